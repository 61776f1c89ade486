"""From tokens to events: special tokens that mark calls reach the parser, however the tokens come."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidRequest
from gateway.conversation import AnswerFormat, ChatMessage, Conversation, Reasoning, Text
from gateway.conversation.formats.harmony_parser import TOKENS
from gateway.requests.request import Delta
from gateway.text import TextStream, Tokenizer
from tests.factories.conversations import (
    ASKED,
    HARMONY,
    TEMPLATES,
    called,
    calls_in,
    merged_events,
    parts_of,
)
from tests.factories.guided import Guide
from tests.factories.models import make_tokenizer_dir


def tokenizer_of(path: Path, template: str, answer_format: str | None = None) -> Tokenizer:
    """All marks are special tokens, which are left out of texts."""
    folder = make_tokenizer_dir(path, template)
    Guide(has_markers=True).tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, answer_format)


def format_of(tokenizer: Tokenizer) -> AnswerFormat:
    assert tokenizer.answer_format is not None
    return tokenizer.answer_format


def texts_of(tokenizer: Tokenizer, groups: Sequence[Sequence[int]]) -> list[str]:
    """The texts that a gateway makes of tokens that come in these groups."""
    stream = TextStream(tokenizer.backend, (), 0, True, kept_tokens=tokenizer.kept_tokens)
    return [*(stream.push(group)[1] for group in groups), stream.flush()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mistral_named", "deepseek_v3", "glm", "minimax", "olmo", "hermes", "harmony"]
)
def test_170_sequences_of_tokens_give_the_same_events_however_they_come(tmp_path: Path, family: str) -> None:
    """More than 500 over these families, which mark calls by special tokens."""
    tokenizer = tokenizer_of(tmp_path, HARMONY if family == "harmony" else TEMPLATES[family])
    answer_format = format_of(tokenizer)
    grammar = answer_format.grammar(ASKED, "", None)
    assert grammar is not None
    guide = Guide(has_markers=True)
    rng = random.Random(family)
    kinds = set()

    for number in range(170):
        if number % 2:
            answer, _ = guide.random_answer(grammar, rng, limit=60)
            ids = list(tokenizer.encode(answer, add_special_tokens=False))
        else:
            ids = rng.choices(range(tokenizer.vocab_size), k=30)
        whole = merged_events(answer_format, texts_of(tokenizer, [ids]))
        kinds |= {event[0] for event in whole}
        assert merged_events(answer_format, texts_of(tokenizer, [[token_id] for token_id in ids])) == whole
        for cut in range(len(ids)):
            assert merged_events(answer_format, texts_of(tokenizer, [ids[:cut], ids[cut:]])) == whole

    assert len(kinds - {Reasoning}) == 4, "text, and calls with arguments that begin and end"


SPELLED = (
    *TOKENS,
    "<|end|><|start|>assistant<|channel|>commentary to=functions.search json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>hidden<|end|>",
)


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>", "<|call|>"])
def test_text_that_spells_harmonys_tokens_is_text(tmp_path: Path, spelled: str, end: str) -> None:
    """This holds in thoughts, arguments and texts, whether they are JSON or not, and however the tokens arrive."""
    tokenizer = tokenizer_of(tmp_path, HARMONY)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def ids_of_letters(text: str) -> list[int]:
        return [token_id for letter in text for token_id in ids_of(letter)]

    text = json.dumps({"a": spelled, spelled: [spelled]})
    call = "<|channel|>commentary to=functions.search json<|message|>"
    ids = [
        *ids_of("<|channel|>analysis<|message|>"),
        *ids_of_letters(spelled),
        *ids_of("<|end|><|start|>assistant"),
    ]
    called = [*ids, *ids_of(call), *ids_of_letters(text), *ids_of(end)]
    ids += [*ids_of("<|channel|>final<|message|>"), *ids_of_letters(text), *ids_of(end)]
    for groups in ([ids], [[token_id] for token_id in ids]):
        whole = merged_events(format_of(tokenizer), texts_of(tokenizer, groups))
        assert whole == [(Reasoning, spelled), (Text, text)]
    parts = parts_of(format_of(tokenizer), texts_of(tokenizer, [called]))
    assert (parts.reasoning, parts.text) == (spelled, "")
    assert calls_in(parts) == [("search", text, True)]


@pytest.mark.parametrize("stop", ["<|end|>", "nnel", "<|channel|>final"])
def test_clients_see_nothing_but_the_text_of_harmonys_tokens(tmp_path: Path, stop: str) -> None:
    tokenizer = tokenizer_of(tmp_path, HARMONY)
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    ids = tokenizer.encode(answer, add_special_tokens=False)

    def text_stream(stops: tuple[str, ...], skips: bool) -> TextStream:
        return TextStream(tokenizer.backend, stops, 0, skips, kept_tokens=tokenizer.kept_tokens)

    for skips in (True, False):
        _, text = text_stream((), skips).push(ids)
        assert Delta(text=text).shown_text == answer
        parts = parts_of(format_of(tokenizer), [text])
        assert (parts.reasoning, parts.text) == ("Hm.", "Yes")
    _, cut = text_stream((stop,), True).push(ids)
    assert Delta(text=cut).shown_text == answer.partition(stop)[0]
    parts = parts_of(format_of(tokenizer), [cut])
    (parts.reasoning + parts.text).encode()


def test_reasoning_that_the_template_has_begun_is_seen_in_the_prompts_tokens(tmp_path: Path) -> None:
    template = TEMPLATES["hermes"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokenizer = tokenizer_of(tmp_path, template)

    prompt = tokenizer.render_chat(ASKED)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = 'Hm.\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": "<b>"}}\n</tool_call>'
    ids = tokenizer.encode(answer, add_special_tokens=False)
    texts = texts_of(tokenizer, [[token_id] for token_id in ids])
    parts = parts_of(format_of(tokenizer), texts, ASKED, tokenizer.prompt_end(prompt_ids))

    assert "".join(texts) == answer
    assert (parts.reasoning, parts.text) == ("Hm.", "")
    assert calls_in(parts) == [("search", '{"query": "<b>"}', True)]


@pytest.mark.parametrize("family", ["hermes", "qwen_coder", "generic"])
def test_a_prompt_has_no_half_of_a_character_that_the_arguments_of_a_call_escape(
    tmp_path: Path, family: str
) -> None:
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[family])
    turn = called(("search", r'{"query": "\ud83d\ude00 \ud83d", "\udc00": 1}'))

    prompt = tokenizer.render_chat(replace(ASKED, messages=(*ASKED.messages, turn)))

    assert "\U0001f600 \ufffd" in prompt
    assert tokenizer.decode(tokenizer.encode(prompt, add_special_tokens=False), False) == prompt


@pytest.mark.parametrize("family", ["hermes", "generic", "minimax"])
def test_the_results_of_a_turn_come_in_the_order_of_its_calls(tmp_path: Path, family: str) -> None:
    """These templates write no ids, so results in another order would belong to other calls."""
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[family])
    turn = called(*(("search", f'{{"query": "{number}"}}') for number in range(3)))
    first, second = (replace(turn, tool_calls=calls) for calls in (turn.tool_calls[:1], turn.tool_calls[1:]))
    results = [
        ChatMessage("tool", f"result of {call.id}", tool_call_id=call.id, name="search")
        for call in turn.tool_calls
    ]
    mixed = (results[2], results[0], results[1])

    for turns in ((turn,), (first, second)):
        prompt = tokenizer.render_chat(replace(ASKED, messages=(*ASKED.messages, *turns, *mixed, *turns)))
        texts = ("result of call_0", "result of call_1", "result of call_2")
        assert sorted(texts, key=prompt.index) == list(texts)


REFUSES_LATE_SYSTEMS = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('systems come first') }}{% endif %}"
)
LEAVES_OUT_LATE_SYSTEMS = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"


@pytest.mark.parametrize("rule", [REFUSES_LATE_SYSTEMS, LEAVES_OUT_LATE_SYSTEMS])
def test_results_on_both_sides_of_a_system_message_are_in_order_where_it_moves(
    rule: str, tmp_path: Path
) -> None:
    loop = "{% for m in messages %}"
    template = TEMPLATES["hermes"].replace(loop, loop + rule)
    turn = called(("search", '{"query": "0"}'), ("search", '{"query": "1"}'))
    first, second = (
        ChatMessage("tool", f"result of {call.id}", tool_call_id=call.id, name="search")
        for call in turn.tool_calls
    )
    system = ChatMessage("system", "In Dutch.")

    messages = (*ASKED.messages, turn, second, system, first)
    prompt = tokenizer_of(tmp_path, template).render_chat(replace(ASKED, messages=messages))

    texts = ("In Dutch.", "result of call_0", "result of call_1")
    assert sorted(texts, key=prompt.index) == list(texts)


def test_gpt_oss_gets_a_result_after_its_call_though_a_text_came_in_between(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, HARMONY)
    turn = called(("search", '{"query": "0"}'))
    result = ChatMessage("tool", "It is warm.", tool_call_id=turn.tool_calls[0].id, name="search")

    messages = (*ASKED.messages, turn, ChatMessage("assistant", "Please wait."), result)
    prompt = tokenizer.render_chat(replace(ASKED, messages=messages))

    texts = ("<|call|>", "It is warm.", "Please wait.")
    assert sorted(texts, key=prompt.index) == list(texts)


def test_a_model_that_wrote_several_calls_in_one_turn_may_continue_though_its_template_wants_one(
    tmp_path: Path,
) -> None:
    """The templates of Llama 3 are such templates, though the model may write several calls."""
    wants_one = (
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    )
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["llama"].replace("{% if m.tool_calls %}", wants_one))
    turn = called(("search", '{"query": "a"}'), ("search", '{"query": "b"}'))
    results = [
        ChatMessage("tool", f"result of {call.id}", tool_call_id=call.id, name="search")
        for call in turn.tool_calls
    ]

    prompt = tokenizer.render_chat(replace(ASKED, messages=(*ASKED.messages, turn, *results)))

    parts = ('"query": "a"', "result of call_0", '"query": "b"', "result of call_1")
    assert sorted(parts, key=prompt.index) == list(parts)


def test_a_template_that_knows_no_tools_gets_the_reasoning_of_earlier_turns_if_it_reads_them(
    tmp_path: Path,
) -> None:
    template = TEMPLATES["generic"].replace("{{ m.content }}", "({{ m.reasoning_content }}){{ m.content }}")
    tokenizer = tokenizer_of(tmp_path, template)
    turn = replace(called(("search", "{}")), reasoning="I should look.")

    prompt = tokenizer.render_chat(replace(ASKED, messages=(*ASKED.messages, turn)))

    assert "<|im_start|>assistant\n(I should look.)<tool_call>" in prompt


def test_a_left_out_system_message_is_noticed_though_a_user_has_its_words(tmp_path: Path) -> None:
    loop = "{% for m in messages %}"
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["generic"].replace(loop, loop + LEAVES_OUT_LATE_SYSTEMS))
    messages = (*ASKED.messages, ChatMessage("system", "In Dutch."), ChatMessage("user", "In Dutch. Please."))
    prompt = tokenizer.render_chat(Conversation(messages))
    assert prompt.count("In Dutch.") == 2


def test_a_system_message_stays_left_out_if_the_template_refuses_it_at_the_beginning(tmp_path: Path) -> None:
    loop = "{% for m in messages %}"
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template = TEMPLATES["generic"].replace(loop, loop + LEAVES_OUT_LATE_SYSTEMS + refuses)
    users = (ChatMessage("user", "Hi"), ChatMessage("system", "In Dutch."), ChatMessage("user", "Go"))
    prompt = tokenizer_of(tmp_path, template).render_chat(Conversation(users))
    assert "Hi" in prompt
    assert "In Dutch." not in prompt


SYSTEMS = (ChatMessage("system", "Be brief.\n"), *ASKED.messages, ChatMessage("system", "In Dutch."))


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("{% if loop.first %}{{ m.content | trim }}\n{% endif %}", ["Be brief.", "In Dutch.", "Zürich"]),
        ("{% if loop.last %}{{ m.content }}\n{% endif %}", ["Zürich", "In Dutch."]),
        ("{{ m.content | trim }}\n", ["Be brief.", "Zürich", "In Dutch."]),
        ("", ["Zürich"]),
    ],
    ids=["only the first", "only the last", "all", "none"],
)
def test_a_system_message_that_a_template_leaves_out_comes_first(
    tmp_path: Path, system: str, expected: list[str]
) -> None:
    """There is one exception: the template leaves it out there, too."""
    template = "{% for m in messages %}{% if m.role == 'system' %}{}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    tokenizer = tokenizer_of(tmp_path, template.replace("{}", system))

    prompt = tokenizer.render_chat(Conversation(SYSTEMS))

    texts = ("Be brief.", "In Dutch.", "Zürich")
    assert sorted((text for text in texts if text in prompt), key=prompt.index) == expected


def test_of_several_templates_the_one_for_tools_shows_the_format(tmp_path: Path) -> None:
    make_tokenizer_dir(tmp_path, TEMPLATES["generic"])
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text(TEMPLATES["mistral"])

    tokenizer = Tokenizer(tmp_path)

    grammar = format_of(tokenizer).grammar(ASKED, "", None)
    assert grammar is not None
    assert "[TOOL_CALLS]" in grammar.source
    assert json.dumps("get_weather") in tokenizer.render_chat(ASKED), (
        "the template for tools is rendered, too"
    )
    assert tokenizer.files()["additional_chat_templates/tool_use.jinja"] == TEMPLATES["mistral"].encode()


def test_the_configured_format_is_taken(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "a", TEMPLATES["hermes"], "llama")

    assert parts_of(format_of(tokenizer), ['{"name": "search", "parameters": {}}']).calls
    with pytest.raises(ConfigError, match=r"gateway\.answer_format: 'llama' needs"):
        tokenizer_of(tmp_path / "b", TEMPLATES["generic"], "llama")
    (make_tokenizer_dir(tmp_path / "c") / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r"gateway\.answer_format: 'generic' needs a chat template, .* use 'auto'"
    ):
        Tokenizer(tmp_path / "c", "generic")


def test_templates_of_which_none_is_for_chats_count_as_none(tmp_path: Path) -> None:
    config = make_tokenizer_dir(tmp_path) / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").unlink()
    templates = [{"name": "rag", "template": TEMPLATES["generic"]}]
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": templates}))

    tokenizer = Tokenizer(tmp_path)

    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template; send text or token ids"):
        tokenizer.render_chat(ASKED)
