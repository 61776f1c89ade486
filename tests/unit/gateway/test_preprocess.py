"""Preprocessor: every prompt and every token is checked against the model, and errors name the field."""

import asyncio
import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest

from baton.clock import SystemClock
from baton.errors import DeadlinePassed, InvalidRequest, PromptTooLong
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from gateway.auth.callers import Caller
from gateway.conversation import ChatMessage, Conversation, Tool, ToolChoice, ToolUse
from gateway.grammars import CompileProcess, GrammarCheck, process_arguments
from gateway.model import ServedModel
from gateway.preprocess import UNLIMITED, ClientRequest, Preprocessor, Prompt
from gateway.requests.request import GatewayRequest
from gateway.text import Tokenizer
from tests.factories.models import make_tokenizer

VOCAB_SIZE = make_tokenizer().get_vocab_size()
MAX_MODEL_LEN = 100


@pytest.fixture(scope="module")
def preprocessor(folder: Path) -> Preprocessor:
    model = ServedModel("tiny", str(folder), MAX_MODEL_LEN, VOCAB_SIZE, (2,), "float32", "float32")
    grammars = GrammarCheck(partial(CompileProcess, process_arguments(folder, model)), SystemClock(), 64)
    return Preprocessor(Tokenizer(folder), model, grammars, 64)


def take_in(
    preprocessor: Preprocessor, prompt: Prompt, params: SamplingParams | None = None
) -> GatewayRequest:
    asked = ClientRequest(prompt=prompt, params=params or SamplingParams(max_tokens=UNLIMITED))

    async def preprocessed() -> GatewayRequest:
        try:
            return await preprocessor.preprocess(asked)
        finally:
            if (process := preprocessor._grammars._process) is not None:
                await process.stop()  # it belongs to this event loop

    return asyncio.run(preprocessed())


def test_c22_isolated_callers_have_no_salt_in_common_whatever_they_send(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def salt_of(name: str, cache_salt: str | None) -> str | None:
        asked = ClientRequest(
            prompt=(5,), params=SamplingParams(), caller=Caller(name), cache_salt=cache_salt
        )
        return asyncio.run(preprocessor.preprocess(asked)).cache_salt

    sent = (None, "", "a", "b", '["a", null]', '["b", "a"]')
    assert [salt_of("a", salt) for salt in sent] == [*sent], "without isolation, salts are the callers' own"
    monkeypatch.setattr(preprocessor, "_isolate_prefix_cache", True)
    salts = {salt_of(name, salt) for name in ("a", "b", '"') for salt in sent}
    assert len(salts - {None}) == 3 * len(sent)
    assert salt_of("a", "b") == salt_of("a", "b"), "a caller's own prefixes are found again"


@pytest.mark.parametrize(
    ("prompt", "field", "text"),
    [
        ("Hi\n", "Hi\n", r"'Hi\n'"),
        (
            Conversation((ChatMessage("user", "Zürich\n\u2028"),), (Tool("add"),)),
            {
                "messages": [{"role": "user", "content": "Zürich\n\u2028"}],
                "tools": [{"name": "add", "parameters": {"type": "object", "properties": {}}}],
            },
            r"""{"messages": [{"role": "user", "content": "Zürich\n\u2028"}], "tools": [{"name": "add", """
            """"parameters": {"type": "object", "properties": {}}}]}""",
        ),
    ],
)
def test_a_logged_prompt_is_what_the_client_sent(
    preprocessor: Preprocessor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prompt: Prompt,
    field: object,
    text: str,
) -> None:
    monkeypatch.setattr(preprocessor, "_log_prompts", True)
    with caplog.at_level("INFO", "gateway.preprocess"), suppress(PromptTooLong):
        take_in(preprocessor, prompt)
    (line,) = caplog.records
    assert line.getMessage().endswith(f": {text}")
    assert line.__dict__["prompt"] == field


def test_an_answer_may_fill_what_the_prompt_leaves(preprocessor: Preprocessor) -> None:
    generation = take_in(preprocessor, (5,) * 40)
    assert generation.prompt_token_ids == (5,) * 40
    assert generation.sampling_params.max_tokens == MAX_MODEL_LEN - 40


def test_fewer_tokens_than_fit_are_left_alone_and_more_must_still_make_sense(
    preprocessor: Preprocessor,
) -> None:
    assert take_in(preprocessor, (5,) * 40, SamplingParams(max_tokens=7)).sampling_params.max_tokens == 7
    with pytest.raises(InvalidRequest, match=r"min_tokens: must be from 0 to max_tokens \(60\), got 61"):
        take_in(preprocessor, (5,) * 40, SamplingParams(max_tokens=90, min_tokens=61))


def test_c63_a_requests_own_context_bounds_prompt_and_answer_and_is_named(preprocessor: Preprocessor) -> None:
    def max_tokens(num_prompt_tokens: int, max_model_len: int, params: SamplingParams | None = None) -> int:
        params = params or SamplingParams(max_tokens=UNLIMITED)
        prompt = (5,) * num_prompt_tokens
        asked = ClientRequest(prompt=prompt, params=params, max_model_len=max_model_len)
        return asyncio.run(preprocessor.preprocess(asked)).sampling_params.max_tokens

    assert max_tokens(40, 50) == 10
    assert max_tokens(40, 50, SamplingParams(max_tokens=7)) == 7
    assert max_tokens(40, MAX_MODEL_LEN) == MAX_MODEL_LEN - 40
    assert max_tokens(49, 50) == 1
    for num_prompt_tokens in (50, 51):
        with pytest.raises(PromptTooLong) as caught:
            max_tokens(num_prompt_tokens, 50)
        room = f"prompt: prompt is too long: {num_prompt_tokens} tokens leave no room for an answer"
        assert str(caught.value) == f"{room}; the request's max_model_len is 50 tokens"
    for wrong in (0, MAX_MODEL_LEN + 1):
        with pytest.raises(
            InvalidRequest, match=rf"max_model_len: must be 1 to the model's 100, got {wrong}"
        ):
            max_tokens(5, wrong)
    with pytest.raises(InvalidRequest, match=r"min_tokens: must be from 0 to max_tokens \(10\), got 11"):
        max_tokens(40, 50, SamplingParams(max_tokens=20, min_tokens=11))


def test_requests_without_a_name_get_one_each(preprocessor: Preprocessor) -> None:
    assert take_in(preprocessor, (5,)).request_id != take_in(preprocessor, (5,)).request_id


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((), "^prompt: must not be empty"),
        (
            (1,) * MAX_MODEL_LEN,
            "^prompt: prompt is too long: 100 tokens .* this model's maximum context length is 100 tokens",
        ),
        ((1, VOCAB_SIZE), f"^token_ids: {VOCAB_SIZE} is not one of the model's {VOCAB_SIZE}"),
    ],
)
def test_prompts_that_the_model_cannot_take(
    preprocessor: Preprocessor, token_ids: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        take_in(preprocessor, token_ids)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=(VOCAB_SIZE,))),
        ("logit_bias", SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    ],
)
def test_tokens_that_the_model_lacks_are_named_by_field(
    preprocessor: Preprocessor, field: str, params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        take_in(preprocessor, (5,), params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (SamplingParams(ignore_eos=True), "ignore_eos: must be false with tools: "),
        (SamplingParams(min_tokens=4), "min_tokens: must be 0 with tools: .*; got 4"),
    ],
)
def test_what_contradicts_the_grammar_of_tools_is_refused_with_the_reason(
    preprocessor: Preprocessor, params: SamplingParams, problem: str
) -> None:
    chat = Conversation((ChatMessage("user", "hi"),), (Tool("f"),))
    with (
        patch.object(preprocessor, "room_after", return_value=50),
        pytest.raises(InvalidRequest, match=problem),
    ):
        take_in(preprocessor, chat, params)


@pytest.mark.parametrize("params", [SamplingParams(ignore_eos=True), SamplingParams(min_tokens=4)])
def test_an_answer_that_may_not_end_has_no_grammar_if_no_tool_may_be_called(
    preprocessor: Preprocessor, params: SamplingParams
) -> None:
    """Load generators such as guidellm send `ignore_eos` with `tool_choice: none`."""
    chat = Conversation((ChatMessage("user", "hi"),), (Tool("f"),), ToolChoice(ToolUse.NONE))
    with patch.object(preprocessor, "room_after", return_value=50):
        assert take_in(preprocessor, chat).sampling_params.structured_output is not None
        request = take_in(preprocessor, chat, params)
    assert request.sampling_params.structured_output is None
    assert request.new_parser() is None, "a call that the model writes stays text"


def test_a_grammar_that_does_not_compile_is_blamed_on_the_field_that_asked_for_it(
    preprocessor: Preprocessor,
) -> None:
    tool = Tool(
        "f", parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "(yes"}}}
    )
    chat = Conversation((ChatMessage("user", "hi"),), (tool,), ToolChoice(ToolUse.REQUIRED))
    answer, valid = (StructuredOutput(GrammarKind.REGEX, regex) for regex in ("(yes", "yes"))
    both = replace(chat, tool_choice=ToolChoice(), tools=(replace(tool, strict=True),))

    for asked, params, problem in (
        (chat, SamplingParams(), "tools: their schemas cannot guide a model: "),
        (both, SamplingParams(structured_output=valid), "tools: their schemas cannot guide a model: "),
        (both, SamplingParams(structured_output=answer), "structured_output: "),
    ):
        with (
            patch.object(preprocessor, "room_after", return_value=50),
            pytest.raises(InvalidRequest, match=problem),
        ):
            take_in(preprocessor, asked, params)
    with pytest.raises(InvalidRequest, match="structured_output: "):
        take_in(preprocessor, (5,), SamplingParams(structured_output=answer))


@pytest.mark.parametrize("key", ["x-guidance", r"x-guid\u0061nce"])
def test_a_schema_that_says_how_the_compiler_writes_json_is_refused(
    preprocessor: Preprocessor, key: str
) -> None:
    def asked(schema: str) -> GatewayRequest:
        output = StructuredOutput(GrammarKind.JSON_SCHEMA, schema)
        return take_in(preprocessor, (5,), SamplingParams(structured_output=output))

    with pytest.raises(InvalidRequest, match="structured_output: the schema has the key 'x-guidance'"):
        asked(f'{{"type": "array", "{key}": {{"item_separator": " @ "}}}}')
    asked(f'{{"properties": {{"{key}": {{"const": 1}}}}}}')  # a property's name, so no option


@pytest.mark.parametrize("key", ["$ref", r"\u0024ref"])
def test_a_schema_with_a_part_that_only_an_endless_value_would_match_is_refused(
    preprocessor: Preprocessor, key: str
) -> None:
    schema = f'{{"properties": {{"a": {{"{key}": "#/$defs/x"}}}}, "$defs": {{"x": {{"$ref": "#/$defs/x"}}}}}}'
    params = SamplingParams(structured_output=StructuredOutput(GrammarKind.JSON_SCHEMA, schema))

    with pytest.raises(InvalidRequest, match=r"structured_output: in the schema, .* requires itself again"):
        take_in(preprocessor, (5,), params)


def test_what_contradicts_the_grammar_of_a_reasoning_budget_is_refused_with_the_reason(
    preprocessor: Preprocessor,
) -> None:
    chat = Conversation((ChatMessage("user", "hi"),))
    guided = StructuredOutput(GrammarKind.REGEX, "a")
    answer_format = preprocessor.pool.tokenizer.answer_format
    with (
        patch.object(type(answer_format), "grammar", lambda *_: guided),
        pytest.raises(InvalidRequest, match="ignore_eos: must be false with a reasoning budget: "),
    ):
        take_in(preprocessor, chat, SamplingParams(ignore_eos=True))


def test_texts_that_fill_the_model_are_refused_and_much_longer_ones_without_tokenizing(
    preprocessor: Preprocessor,
) -> None:
    with pytest.raises(InvalidRequest, match="leave no room"):
        take_in(preprocessor, "x" * MAX_MODEL_LEN)
    with pytest.raises(InvalidRequest, match="characters exceed the model's limit"):
        take_in(preprocessor, "x" * 100 * MAX_MODEL_LEN)


async def test_a_deadline_counts_from_before_the_prompt_is_tokenized(preprocessor: Preprocessor) -> None:
    def slow(turns: Conversation, add_generation_prompt: bool) -> str:
        time.sleep(0.2)
        return "hi"

    with patch.object(preprocessor.pool.tokenizer, "render_chat", slow):
        asked = ClientRequest(
            prompt=Conversation((ChatMessage("user", "hi"),)),
            params=SamplingParams(),
            deadline=asyncio.get_running_loop().time() + 0.05,
        )
        with pytest.raises(DeadlinePassed, match="before its prompt was tokenized"):
            await preprocessor.preprocess(asked)


def test_c58_the_grammar_of_large_schemas_is_made_on_a_thread(preprocessor: Preprocessor) -> None:
    threads: list[str] = []

    def checked(output: StructuredOutput) -> StructuredOutput:
        threads.append(threading.current_thread().name)
        return output

    def grammar(*_: object) -> StructuredOutput:
        threads.append(threading.current_thread().name)
        return StructuredOutput(GrammarKind.REGEX, "a")

    answer_format = preprocessor.pool.tokenizer.answer_format
    small, large = {"enum": ["a"]}, {"enum": ["a" * 5_000]}
    tools = [Tool("f", None, small, strict=True), Tool("f", None, large), Tool("f", None, large, strict=True)]
    with (
        patch("gateway.preprocess.checked_response_format", checked),
        patch.object(type(answer_format), "grammar", grammar),
        patch.object(preprocessor, "room_after", return_value=50),
        patch.object(preprocessor, "tokenize", AsyncMock(return_value=(5,) * 10_000)),
    ):
        for schema in (small, large):
            output = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
            take_in(preprocessor, (5,), SamplingParams(structured_output=output))
        for tool in tools:
            take_in(preprocessor, Conversation((ChatMessage("user", "hi"),), (tool,)), SamplingParams())
    assert [name.startswith("tokenizer") for name in threads] == [False, True, False, False, True]


def test_only_schemas_that_calls_must_match_make_a_grammar_costly() -> None:
    tools = (Tool("f", None, {"enum": ["a" * 5_000]}), Tool("g", None, {"enum": ["a" * 5_000]}, strict=True))

    def cost(use: ToolUse, *tools: Tool) -> int:
        return Conversation((), tools, ToolChoice(use)).grammar_cost

    for tool, use, least in (
        (tools[0], ToolUse.AUTO, 250),
        (tools[0], ToolUse.REQUIRED, 5_000),
        (tools[1], ToolUse.AUTO, 5_000),
    ):
        assert least <= cost(use, tool) < least + 100
    assert cost(ToolUse.NONE, *tools) == cost(ToolUse.REQUIRED) == 0


def test_a_conversation_is_rendered_with_the_models_own_template(preprocessor: Preprocessor) -> None:
    said = take_in(preprocessor, Conversation((ChatMessage("user", "hi"),))).prompt_token_ids
    assert take_in(preprocessor, "hi").prompt_token_ids[-1] in said
    assert said != take_in(preprocessor, Conversation((ChatMessage("system", "hi"),))).prompt_token_ids
