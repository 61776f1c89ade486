"""Harmony's messages are read as they come, guided by their channels, and rendered one call to a turn."""

import random
from dataclasses import replace
from functools import partial

import llguidance
import pytest

from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import (
    AnswerPart,
    ChatMessage,
    ReasoningOptions,
    ToolChoice,
    ToolUse,
    Vocabulary,
    answer_format_of,
)
from gateway.conversation.formats.harmony import HarmonyFormat
from gateway.conversation.formats.harmony_parser import TOKENS
from gateway.grammars.depth import check_depth
from tests.factories import costs
from tests.factories.conversations import (
    ASKED,
    HARMONY,
    TOOLS,
    called,
    calls_in,
    format_of,
    merged_events,
    parts_of,
    random_answer,
    rendered,
)
from tests.factories.costs import expect_cost_in_proportion
from tests.factories.guided import GUIDES, Guide, both

FORMAT = format_of("harmony")

ARGUMENTS = '{"city": "Zürich", "days": 3}'
AGAIN = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I look < up.<|end|>" + AGAIN
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|>" + AGAIN
FINAL = "<|channel|>final<|message|>It is warm."
HEADS = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
)
CALL = HEADS[0] + ARGUMENTS
SEARCH_CALL = ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}'
WRONG = HEADS[0] + '{"days": 3}'
REQUIRED = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
NONE = replace(ASKED, tool_choice=ToolChoice(ToolUse.NONE))
JSON_ANSWER = StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a"]}')


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("end", ["<|call|>", ""])
def test_thoughts_preambles_and_calls_are_told_apart(head: str, end: str) -> None:
    parts = parts_of(FORMAT, [THOUGHT + PREAMBLE + head + ARGUMENTS + end])

    assert (parts.reasoning, parts.text) == ("I look < up.", "Wait.")
    assert calls_in(parts) == [("get_weather", ARGUMENTS, True)]
    assert parts.ends_with_calls


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", ""])
def test_the_final_message_is_text_as_it_is(end: str) -> None:
    parts = parts_of(FORMAT, [THOUGHT + "<|channel|>final<|message|>  Yes \n" + end])

    assert (parts.reasoning, parts.text, parts.calls) == ("I look < up.", "  Yes \n", [])


def test_several_calls_and_messages_of_one_kind() -> None:
    parts = parts_of(FORMAT, [THOUGHT + THOUGHT + CALL + "<|call|>" + AGAIN + SEARCH_CALL])

    assert [name for name, _, _ in calls_in(parts)] == ["get_weather", "search"]
    assert parts.reasoning == "I look < up.\nI look < up."
    assert parts_of(FORMAT, [PREAMBLE + FINAL]).text == "Wait.\nIt is warm."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Yes.", "Yes."),
        ("  to be", "  to be"),
        ("to", "to"),
        ("<|channel|>poem<|message|>Ah", "Ah"),
        ("<|message|>Ah<|constrain|>!", "Ah!"),
        ("<|start|>assistant<|message|>Ah", "Ah"),
        ("<|channel|>final<|channel|>final<|message|>Ah", "final\nAh"),
        ("<|channel|>commentary to=functions.get_weather<|message|>no JSON<|call|>", "no JSON"),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", "1 + 1"),
        ("<|end|><|call|>Ah<|return|>", "Ah"),
        ("<|channel|>final<|message|>Ah<|end|><|start|>assi", "Ah"),
        ("<|channel|>comm", ""),
        ("", ""),
    ],
)
def test_what_is_no_message_of_a_known_kind_is_text_without_tokens(answer: str, text: str) -> None:
    parts = parts_of(FORMAT, [answer])

    assert (parts.text, parts.reasoning, parts.calls) == (text, "", [])


def test_a_call_without_content_has_no_arguments_and_a_cut_one_those_so_far() -> None:
    assert calls_in(parts_of(FORMAT, [HEADS[0] + "<|call|>"])) == [("get_weather", "{}", True)]
    assert calls_in(parts_of(FORMAT, [HEADS[0] + '{"ci'])) == [("get_weather", '{"ci', False)]
    known = "<|channel|>commentary to=search<|message|>{}<|call|>"
    assert calls_in(parts_of(FORMAT, [known])) == [("search", "{}", True)]


def test_an_answer_that_ends_anywhere_shows_no_part_of_a_head() -> None:
    """This holds however many messages the answer has, and in whatever pieces it comes."""
    answer = f"{THOUGHT}{CALL}<|end|>{AGAIN}{SEARCH_CALL}"
    for end in range(len("<|channel|>"), len(answer) + 1):
        parts = parts_of(FORMAT, [answer[:end]])
        assert parts.text == ""
        assert parts.reasoning in THOUGHT
        assert merged_events(FORMAT, [*answer[:end]]) == merged_events(FORMAT, [answer[:end]])
    for end in range(len(HEADS[0])):
        assert parts_of(FORMAT, [HEADS[0][:end]]).text in HEADS[0][:end][: len(" to=functions")]


def test_without_tools_a_call_is_text_and_reasoning_is_still_read() -> None:
    for conversation in (NONE, replace(ASKED, tools=())):
        parts = parts_of(FORMAT, [THOUGHT + CALL], conversation)
        assert (parts.reasoning, parts.text, parts.calls) == ("I look < up.", ARGUMENTS, [])


def test_the_part_follows_the_channel() -> None:
    parser = FORMAT.new_parser(ASKED, "")
    assert parser is not None
    seen = []
    for piece in ("<|channel|>analysis<|message|>", "x<|end|>", AGAIN + HEADS[1], "{}", FINAL):
        parser.push(piece)
        seen.append(parser.part)

    text = AnswerPart.TEXT
    assert seen == [AnswerPart.REASONING, text, AnswerPart.CALL, text, text]


@pytest.mark.slow
def test_300_answers_give_the_same_events_wherever_they_are_cut() -> None:
    rng = random.Random(4)
    pieces = [
        *TOKENS,
        THOUGHT,
        PREAMBLE,
        CALL,
        SEARCH_CALL,
        FINAL,
        *HEADS,
        AGAIN,
        "to=",
        "{",
        "\n",
        " ",
        "Hi. ",
    ]

    for _ in range(300):
        answer = random_answer(rng, pieces)
        whole = merged_events(FORMAT, [answer])
        assert merged_events(FORMAT, [*answer]) == whole
        for cut in rng.sample(range(len(answer)), min(len(answer), 15)):
            assert merged_events(FORMAT, [answer[:cut], answer[cut:]]) == whole
        text = parts_of(FORMAT, rng.choices(pieces, k=8)).text  # of whole tokens
        assert not any(token in text for token in TOKENS)


@pytest.mark.parametrize(
    "text",
    [
        *(token * 4_000 for token in (*TOKENS, "<|start|><|channel|>", "<|channel|>a to=")),
        "<|channel|>" + "x" * 100_000,
        "<|channel|>final" + " x" * 50_000,
        "<|start|>" + " " * 100_000,
        HEADS[0] + "{" * 200_000,
        FINAL + "\n" * 100_000,
        "<" * 100_000,
    ],
)
def test_hostile_text_costs_time_in_proportion(text: str) -> None:
    def read(length: int) -> None:
        parser = FORMAT.new_parser(ASKED, "")
        assert parser is not None
        for begin in range(0, length, 50):
            parser.push(text[begin : min(begin + 50, length)])
        parser.flush()

    expect_cost_in_proportion(lambda length: partial(read, length), len(text))


def accepts(guide: Guide, conversation: object, answer: str, form: StructuredOutput | None = None) -> bool:
    grammar = format_of("harmony", guide.vocabulary).grammar(conversation, "", form)  # type: ignore[arg-type]
    assert grammar is not None
    check_depth(grammar)
    return guide.accepts(grammar, answer)


@both
def test_a_model_that_may_call_writes_messages(guide: Guide) -> None:
    for before in ("", THOUGHT, THOUGHT + PREAMBLE, PREAMBLE + THOUGHT):
        for last in (FINAL, CALL, SEARCH_CALL, WRONG):
            assert accepts(guide, ASKED, before + last)
    for wrong in (
        "Hello.",
        CALL.replace("get_weather", "get_money"),
        CALL.replace('{"city', "{city"),
        THOUGHT,
    ):
        assert not accepts(guide, ASKED, wrong)
    strict = replace(ASKED, tools=tuple(replace(tool, strict=True) for tool in TOOLS))
    assert accepts(guide, strict, THOUGHT + CALL)
    assert not accepts(guide, strict, THOUGHT + WRONG)


@both
def test_required_calls_come_behind_thoughts_alone(guide: Guide) -> None:
    two = THOUGHT + CALL + "<|end|>" + AGAIN + SEARCH_CALL
    for head in HEADS:
        assert accepts(guide, REQUIRED, THOUGHT + head + ARGUMENTS)
    assert accepts(guide, REQUIRED, two)
    assert not accepts(guide, replace(REQUIRED, parallel_tool_calls=False), two)
    for wrong in (FINAL, THOUGHT + FINAL, PREAMBLE + CALL, WRONG):
        assert not accepts(guide, REQUIRED, wrong)
    named = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED, ("search",)))
    assert accepts(guide, named, THOUGHT + SEARCH_CALL)
    assert not accepts(guide, named, THOUGHT + CALL)


@both
def test_no_call_where_none_may_be(guide: Guide) -> None:
    assert accepts(guide, NONE, THOUGHT + PREAMBLE + FINAL)
    assert not accepts(guide, NONE, THOUGHT + CALL)


@both
def test_a_response_format_holds_for_the_final_message(guide: Guide) -> None:
    fits = '<|channel|>final<|message|>{"a": 1}'
    for conversation in (ASKED, NONE, replace(ASKED, tools=())):
        assert accepts(guide, conversation, THOUGHT + fits, JSON_ANSWER)
        assert not accepts(guide, conversation, THOUGHT + FINAL, JSON_ANSWER)
        assert not accepts(guide, conversation, PREAMBLE + fits, JSON_ANSWER)
    assert accepts(guide, ASKED, THOUGHT + CALL, JSON_ANSWER)
    with pytest.raises(InvalidRequest, match="structured_output: "):
        FORMAT.grammar(ASKED, "", StructuredOutput(GrammarKind.LARK, 'start: "a"'))


def test_reasoning_ends_at_its_budget_of_tokens() -> None:
    asked = replace(ASKED, tools=(), reasoning=ReasoningOptions(max_tokens=5))
    guide = GUIDES["markers are tokens"]

    def thought(number: int) -> str:
        return "<|channel|>analysis<|message|>" + "#" * number + "<|end|>" + AGAIN

    assert accepts(guide, asked, thought(5) + PREAMBLE + FINAL)
    assert accepts(guide, asked, FINAL)
    assert not accepts(guide, asked, thought(6) + FINAL)
    assert not accepts(guide, asked, thought(2) + thought(2) + FINAL)
    without = replace(asked, reasoning=ReasoningOptions(max_tokens=0))
    assert accepts(guide, without, thought(0) + FINAL)
    assert not accepts(guide, without, thought(1) + FINAL)
    with pytest.raises(InvalidRequest, match=r"reasoning: .* is not one token"):
        FORMAT.grammar(asked, "", None)
    assert FORMAT.grammar(replace(ASKED, tools=()), "", None) is None


def test_c58_the_tokens_of_a_budget_are_found_once() -> None:
    """A vocabulary may have 200,000 tokens."""
    answer_format = format_of("harmony", Guide(has_markers=True).vocabulary)
    asked = replace(ASKED, tools=(), reasoning=ReasoningOptions(max_tokens=5))
    counts = [costs.calls_in(lambda: answer_format.grammar(asked, "", None)) for _ in "ab"]
    assert [count["ranges"] for count in counts] == [1, 0]


@both
def test_whatever_a_grammar_lets_through_is_read(guide: Guide) -> None:
    answer_format = format_of("harmony", guide.vocabulary)
    rng = random.Random(7)
    grammar = answer_format.grammar(REQUIRED, "", None)
    assert grammar is not None
    num_ended = 0
    for _ in range(15):
        answer, has_ended = guide.random_answer(grammar, rng)
        for token, text in answer_format.kept_special_tokens.items():
            answer = answer.replace(token, text)
        parts = parts_of(answer_format, [answer], REQUIRED)
        assert parts.text == ""
        num_ended += has_ended
        assert parts.ends_with_calls or not has_ended
    assert num_ended >= 3


@both
@pytest.mark.parametrize("token", TOKENS)
def test_a_text_that_spells_the_beginning_of_a_token_goes_on(guide: Guide, token: str) -> None:
    grammar = format_of("harmony", guide.vocabulary).grammar(ASKED, "", None)
    assert grammar is not None
    for channel in ("analysis", "commentary", "final"):
        matcher = guide.matcher(grammar)
        for text in (f"<|channel|>{channel}<|message|>", *token[:-1]):
            ids = guide.tokenizer.encode(text, add_special_tokens=False).ids
            assert matcher.try_consume_tokens(ids) == len(ids)
        for text in "| ":
            matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            assert matcher.consume_token(guide.tokenizer.encode(text, add_special_tokens=False).ids[0])


def test_a_guided_call_ends_with_the_token_that_ends_the_turn() -> None:
    guide = GUIDES["markers are tokens"]
    ends = [guide.tokenizer.get_vocab()[token] for token in ("<|return|>", "<|call|>")]
    library = llguidance.LLTokenizer(
        guide.tokenizer.to_str(), n_vocab=guide.tokenizer.get_vocab_size(), eos_token=ends
    )
    grammar = format_of("harmony", guide.vocabulary).grammar(REQUIRED, "", None)
    assert grammar is not None
    matcher = llguidance.LLMatcher(
        library, llguidance.LLMatcher.grammar_from_lark(grammar.source), log_level=0
    )
    ids = guide.tokenizer.encode(THOUGHT + CALL, add_special_tokens=False).ids

    assert matcher.try_consume_tokens(ids[:-1]) == len(ids) - 1
    assert matcher.validate_tokens([ends[1]]) == 0
    assert matcher.consume_token(ids[-1])
    assert matcher.validate_tokens([ends[1]]) == 1
    assert matcher.consume_token(ends[1])
    assert matcher.is_stopped()


def test_a_template_shows_harmony_and_gets_effort() -> None:
    assert isinstance(FORMAT, HarmonyFormat)
    assert isinstance(answer_format_of(HARMONY, Vocabulary(), "harmony"), HarmonyFormat)
    low = replace(ASKED, reasoning=ReasoningOptions(is_enabled=True, effort="low"))

    prompt = rendered(FORMAT, HARMONY, low)

    assert "Reasoning: low" in prompt
    assert prompt.endswith("<|end|><|start|>assistant")
    with pytest.raises(InvalidRequest, match=r"reasoning: .* cannot turn reasoning off"):
        rendered(FORMAT, HARMONY, replace(ASKED, reasoning=ReasoningOptions(is_enabled=False)))


def test_each_earlier_call_is_a_turn_with_its_result_behind_it() -> None:
    turn = replace(
        called(("search", '{"query": "a"}'), ("get_weather", ARGUMENTS)), content="Wait.", reasoning="Hm."
    )
    results = (
        ChatMessage("tool", "warm", tool_call_id="call_1", name="get_weather"),
        ChatMessage("tool", "found", tool_call_id="call_0", name="search"),
    )

    prompt = rendered(FORMAT, HARMONY, replace(ASKED, messages=(*ASKED.messages, turn, *results)))

    assert prompt.partition("Zürich?<|end|>")[2] == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"query": "a"}<|call|>'
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"found"<|end|>'
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"warm"<|end|>'
        "<|start|>assistant"
    )


def on(channel: str, text: str) -> str:
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"


@pytest.mark.parametrize("thought", ["Now.", "", None])
@pytest.mark.parametrize("later", ["So.", None])
def test_a_text_before_a_call_does_not_hide_the_thoughts_before_it(
    thought: str | None, later: str | None
) -> None:
    """The template leaves out thoughts before a final message. After the answer, such a text is one. If a thought
    follows it, items of /v1/responses become two messages."""
    call, found = called(("search", "{}")), ChatMessage("tool", "found", tool_call_id="call_0", name="search")
    remark = ChatMessage("assistant", "Wait.", reasoning=thought)
    turn = (
        (remark, replace(call, reasoning=later)) if later else (replace(remark, tool_calls=call.tool_calls),)
    )
    loop = (*ASKED.messages, replace(call, reasoning="Hm."), found, *turn, found)

    during = rendered(FORMAT, HARMONY, replace(ASKED, messages=loop))
    after = rendered(FORMAT, HARMONY, replace(ASKED, messages=(*loop, ChatMessage("assistant", "Done."))))

    text = on("analysis", "Now.") + on("commentary", "Wait.") if thought else on("analysis", "Wait.")
    assert on("analysis", "Hm.") in during
    assert text + (on("analysis", later) if later else "") + "<|start|>assistant to=" in during
    assert "<|channel|>final" not in during
    assert "analysis" not in after
    assert on("final", "Wait.") in after
    assert on("final", "Done.") in after
