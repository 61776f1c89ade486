"""From tokens to events: special tokens that mark calls reach the parser, however the tokens come."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.errors import ModelError
from gateway.text import TextStream, Tokenizer
from tests.factories.conversations import ASKED, TEMPLATES, calls_in, merged_events, parts_of
from tests.factories.guided import Guide
from tests.factories.models import make_tokenizer_dir


def tokenizer_of(path: Path, template: str, answer_format: str | None = None) -> Tokenizer:
    """All marks are special tokens, which are left out of texts."""
    folder = make_tokenizer_dir(path, template)
    Guide(has_markers=True).tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, answer_format)


def texts_of(tokenizer: Tokenizer, groups: Sequence[Sequence[int]]) -> list[str]:
    """As a gateway makes them of tokens that come in these groups."""
    stream = TextStream(tokenizer.backend, (), 0, True, kept_tokens=tokenizer.kept_tokens)
    return [*(stream.push(group)[1] for group in groups), stream.flush()]


@pytest.mark.parametrize("family", ["mistral_named", "deepseek_v3", "hermes"])
def test_170_sequences_of_tokens_give_the_same_events_however_they_come(tmp_path: Path, family: str) -> None:
    """More than 500 over these families, which mark calls by special tokens."""
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[family])
    answer_format = tokenizer.answer_format
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

    assert len(kinds) == 4, "text, and calls with arguments that begin and end"


def test_reasoning_that_the_template_has_begun_is_seen_in_the_prompts_tokens(tmp_path: Path) -> None:
    template = TEMPLATES["hermes"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokenizer = tokenizer_of(tmp_path, template)

    prompt = tokenizer.render_chat(ASKED)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = 'Hm.\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": "<b>"}}\n</tool_call>'
    ids = tokenizer.encode(answer, add_special_tokens=False)
    texts = texts_of(tokenizer, [[token_id] for token_id in ids])
    parts = parts_of(tokenizer.answer_format, texts, ASKED, tokenizer.prompt_end(prompt_ids))

    assert "".join(texts) == answer
    assert (parts.reasoning, parts.text) == ("Hm.", "")
    assert calls_in(parts) == [("search", '{"query": "<b>"}', True)]


def test_of_several_templates_the_one_for_tools_shows_the_format(tmp_path: Path) -> None:
    make_tokenizer_dir(tmp_path, TEMPLATES["generic"])
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text(TEMPLATES["mistral"])

    tokenizer = Tokenizer(tmp_path)

    grammar = tokenizer.answer_format.grammar(ASKED, "", None)
    assert grammar is not None
    assert "[TOOL_CALLS]" in grammar.source
    assert json.dumps("get_weather") in tokenizer.render_chat(ASKED), (
        "the template for tools is rendered, too"
    )


def test_the_configured_format_is_taken(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "a", TEMPLATES["hermes"], "llama")

    assert parts_of(tokenizer.answer_format, ['{"name": "search", "parameters": {}}']).calls
    with pytest.raises(ModelError, match=r"gateway\.answer_format: 'llama' needs"):
        tokenizer_of(tmp_path / "b", TEMPLATES["generic"], "llama")
