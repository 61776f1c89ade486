"""Each token's part of an answer is exact, however late the events with its text come."""

from dataclasses import replace

import pytest

from baton.request import TokenLogprobs
from baton.sampling import SamplingParams
from gateway.conversation import (
    AnswerFormat,
    ChatMessage,
    Conversation,
    Tool,
    Vocabulary,
    answer_format_of,
)
from gateway.requests.request import GatewayRequest
from gateway.text import TextStream, Tokenizer
from gateway.token_parts import ReasoningCount, TextLogprobs, TokenParts
from tests.factories.conversations import HARMONY, THINKING

ASKED = Conversation((ChatMessage("user", "Hi"),), (Tool("look"),))
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "x < y"}}\n</tool_call>'


def request_of(tokenizer: Tokenizer, answer_format: AnswerFormat, prompt_end: str = "") -> GatewayRequest:
    return GatewayRequest(
        request_id="r",
        prompt_token_ids=tokenizer.encode("Hello"),
        sampling_params=SamplingParams(),
        text=TextStream(tokenizer.backend, (), 0, True, tokenizer.encode("Hello")),
        new_parser=lambda: answer_format.new_parser(ASKED, prompt_end),
    )


def parts_of(tokenizer: Tokenizer, answer_format: AnswerFormat, prompt_end: str = "") -> TokenParts:
    return TokenParts(request_of(tokenizer, answer_format, prompt_end))


def thinking() -> AnswerFormat:
    return answer_format_of(THINKING, Vocabulary())


def taken(parts: TokenParts, token_ids: tuple[int, ...], at_once: int) -> list[int]:
    """The tokens that are text."""
    return [token_id for _, token_id in numbered(parts, token_ids, at_once)]


def numbered(parts: TokenParts, token_ids: tuple[int, ...], at_once: int) -> list[tuple[int, int]]:
    """The tokens that are text, each after the number of its text."""
    found: list[TextLogprobs] = []
    for begin in range(0, len(token_ids), at_once):
        piece = token_ids[begin : begin + at_once]
        found += parts.on_tokens(piece, [TokenLogprobs(each, -1.0, 1, ()) for each in piece])
    return [(number, each.token_id) for number, each in (*found, *parts.flush())]


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reasoning", "text", "call"),
    [
        ("<think>\nI thi\u20acnk \u65e5 a < b </thin</think>", "The answer\u20ac", ""),
        ("<think>\nI think</think>", "", CALL),
        ("<think>\nI think", "", ""),
        ("", "Is a < b? <tool>", ""),
        ("", "Look: ", CALL),
        ("", "", CALL + CALL),
        ("", "An attempt: <tool_call> that is none", ""),
        ("", "", CALL + "\n<tool_call>\n{"),
        ("", "Look: ", f"{CALL}\n<tool_"),
    ],
)
def test_tags_count_as_what_they_enclose(
    tokenizer: Tokenizer, reasoning: str, text: str, call: str, at_once: int
) -> None:
    """Tags of many tokens, and characters of several tokens; how many tokens come at once does not matter."""
    pieces = [tokenizer.encode(part) for part in (reasoning, text, call)]
    parts = parts_of(tokenizer, thinking())
    assert taken(parts, tuple(each for piece in pieces for each in piece), at_once) == list(
        tokenizer.encode(text.rstrip() if call else text)
    )
    assert parts.num_reasoning_tokens == len(pieces[0])


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_texts_between_reasoning_and_calls_are_numbered(tokenizer: Tokenizer, at_once: int) -> None:
    texts = ["Look:", "Well\u20ac:", "Done"]
    answer = f"<think>Hm</think>{texts[0]}{CALL}{CALL}{texts[1]}{CALL}{texts[2]}"
    tokens = numbered(parts_of(tokenizer, thinking()), tokenizer.encode(answer), at_once)
    for number, text in enumerate(texts):
        ids = [token_id for of, token_id in tokens if of == number]
        assert tokenizer.decode(ids, False) == text


def test_reasoning_that_the_prompt_began(tokenizer: Tokenizer) -> None:
    reasoning, text = tokenizer.encode("I think</think>"), tokenizer.encode("Yes")
    parts = parts_of(tokenizer, thinking(), "<think>\n")
    assert taken(parts, reasoning + text, 1) == list(text)
    assert parts.num_reasoning_tokens == len(reasoning)


def test_a_plain_answer_is_text(tokenizer: Tokenizer) -> None:
    request_parts = TokenParts(
        GatewayRequest(
            request_id="r",
            prompt_token_ids=(5,),
            sampling_params=SamplingParams(),
            text=TextStream(tokenizer.backend, (), 0, True),
        )
    )
    assert taken(request_parts, (5, 6), 1) == [5, 6]
    assert request_parts.num_reasoning_tokens == 0


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>\nI th\u20acnk</think>\n\nThe answer", "<think>\nI th\u20acnk</think>"),
        ("<think>\nI think", "<think>\nI think"),
        ("The <think>answer</think>", ""),
        (f"<think>Look</think>{CALL}", "<think>Look</think>"),
        (CALL, ""),
    ],
)
def test_reasoning_is_counted(tokenizer: Tokenizer, text: str, reasoning: str, at_once: int) -> None:
    """Tags are cut into many tokens, and one of them may join two parts."""
    request = request_of(tokenizer, thinking())
    count, token_ids = ReasoningCount(request), tokenizer.encode(text)
    for begin in range(0, len(token_ids), at_once):
        count.on_tokens(token_ids[begin : begin + at_once])
    parts = TokenParts(request)
    taken(parts, token_ids, at_once)
    assert count.num_tokens == parts.num_reasoning_tokens
    assert abs(count.num_tokens - len(tokenizer.encode(reasoning))) <= 1


def test_reasoning_in_several_messages_is_counted(tokenizer: Tokenizer) -> None:
    thought, head = "<|channel|>analysis<|message|>I think<|end|>", "<|start|>assistant"
    reasoning, final = f"{thought}{head}{thought}", f"{head}<|channel|>final<|message|>Yes"
    count = ReasoningCount(request_of(tokenizer, answer_format_of(HARMONY, Vocabulary())))
    count.on_tokens(tokenizer.encode(reasoning) + tokenizer.encode(final))
    assert count.num_tokens == len(tokenizer.encode(reasoning))


@pytest.mark.parametrize("answer", ["<think>I think</think>", ""])
def test_behind_its_reasoning_an_answer_is_not_read_again(tokenizer: Tokenizer, answer: str) -> None:
    request = request_of(tokenizer, thinking())
    reads = 0

    class Counted:
        """The request's own parser, whose pushes are counted."""

        def __init__(self) -> None:
            parser = answer_format.new_parser(ASKED, "")
            assert parser is not None
            self._parser = parser

        def __getattr__(self, name: str) -> object:
            nonlocal reads
            reads += name == "push"
            return getattr(self._parser, name)

    answer_format = thinking()
    count = ReasoningCount(replace(request, new_parser=Counted))  # type: ignore[arg-type]
    count.on_tokens(tokenizer.encode(f"{answer}Yes"))
    num_first = reads
    for _ in range(9):
        count.on_tokens(tokenizer.encode("and more"))
    assert (num_first, reads) == (len(tokenizer.encode(f"{answer}Yes")), num_first)
