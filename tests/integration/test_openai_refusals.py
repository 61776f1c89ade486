"""Refused requests: each with its status, OpenAI's code, and the invalid field."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from gateway.http.body import Body
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.messages import AssistantMessage, InputMessage, ToolMessage
from gateway.http.tokenize import DetokenizeRequest, TokenizeRequest
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("baton").ids
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hello"}


async def refusals(folder: Path, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The error of each request. After all of them, a good request is answered."""
    errors = []
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test,
        under_test.http() as client,
    ):
        for body in bodies:
            answer = await client.post(path, json=body)
            assert answer.status_code >= 400, body
            assert answer.headers["x-request-id"]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            errors.append(answer.json()["error"] | {"status": answer.status_code})
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    return errors


def unsupported(body: type[Body]) -> list[str]:
    """Fields that can only be null."""
    properties = body.model_json_schema()["properties"]
    return [name for name, schema in properties.items() if schema.get("type") == "null"]


async def test_unsupported_and_unknown_fields_are_refused_by_name(folder: Path) -> None:
    """OpenAI's fields without support here, and unknown ones. For the former, null means absent."""
    assert {"functions", "function_call", "audio", "metadata", "prompt_cache_options"} <= set(
        unsupported(ChatCompletionRequest)
    )
    fields = [*unsupported(ChatCompletionRequest), "foo", "prompt", "echo"]
    errors = await refusals(folder, "/v1/chat/completions", [CHAT | {field: []} for field in fields])
    assert [(error["status"], error["param"]) for error in errors] == [(400, field) for field in fields]
    assert all(field in error["message"] for field, error in zip(fields, errors, strict=True))
    fields = [*unsupported(CompletionRequest), "foo", "messages", "top_logprobs", "tools"]
    errors = await refusals(folder, "/v1/completions", [TEXT | {field: "x"} for field in fields])
    assert [(error["status"], error["param"]) for error in errors] == [(400, field) for field in fields]
    turns, fields = [], []
    for role, kind in (("user", InputMessage), ("assistant", AssistantMessage), ("tool", ToolMessage)):
        turn = {"role": role, "content": ""} | ({"tool_call_id": "a"} if role == "tool" else {})
        others = [*unsupported(kind), *({"tool_calls", "tool_call_id"} - set(kind.model_fields)), "foo"]
        turns += [turn | {field: "x"} for field in others]
        fields += others
    errors = await refusals(folder, "/v1/chat/completions", [CHAT | {"messages": [turn]} for turn in turns])
    assert [error["param"] for error in errors] == [f"messages.0.{field}" for field in fields]


async def test_null_means_absent(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test,
        under_test.http() as client,
    ):
        for path, body, request in (
            ("/v1/chat/completions", CHAT, ChatCompletionRequest),
            ("/v1/completions", TEXT, CompletionRequest),
        ):
            nulls = dict.fromkeys(request.model_fields, None)
            assert (await client.post(path, json=nulls | body)).status_code == 200
            streamed = {"stream": True, "stream_options": dict.fromkeys(StreamOptions.model_fields, None)}
            answer = await client.post(path, json=nulls | body | streamed)
            assert (answer.status_code, "usage" in answer.text) == (200, False)
        for path, body, names in (
            ("/tokenize", {"prompt": "Hello"}, TokenizeRequest.model_fields),
            ("/tokenize", {"messages": CHAT["messages"]}, TokenizeRequest.model_fields),
            ("/detokenize", {"tokens": ANSWER}, DetokenizeRequest.model_fields),
        ):
            answer = await client.post(path, json=dict.fromkeys(names, None) | body)
            assert (answer.status_code, answer.json()) == (200, (await client.post(path, json=body)).json())


def test_every_field_that_may_be_left_out_may_be_null() -> None:
    """This holds for every body, and for every part of a body."""

    def kinds(body: type[Body]) -> set[type[Body]]:
        return {body, *(each for kind in body.__subclasses__() for each in kinds(kind))}

    refusing = [
        f"{kind.__name__}.{name}"
        for kind in kinds(Body) - {Body}
        for name, field in kind.model_fields.items()
        if not field.is_required() and not takes_null(field)
    ]
    assert refusing == []


def takes_null(field: FieldInfo) -> bool:
    annotation: Any = field.annotation
    try:
        TypeAdapter(annotation).validate_python(None)
    except ValidationError:
        return False
    return True


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("path", "body", "refused"),
    [
        (
            "/v1/chat/completions",
            CHAT,
            [
                ("temperature", {"temperature": "hot"}, "must be a valid number, got 'hot'"),
                ("temperature", {"temperature": -1}, "greater than or equal to 0, got -1"),
                ("temperature", {"temperature": True}, "must be a valid number, got true"),
                ("top_p", {"top_p": 0}, "greater than 0"),
                ("n", {"n": 0}, "greater than or equal to 1"),
                ("n", {"n": 129}, "less than or equal to 128"),
                ("n", {"n": "2"}, "must be a valid integer, got '2'"),
                ("seed", {"seed": 2**63}, "less than or equal to 9223372036854775807"),
                ("stop", {"stop": 7}, "must be a valid string or must be a valid list, got 7"),
                ("stop.1", {"stop": ["a", 7]}, "must be a valid string, got 7"),
                ("stop", {"stop": ["x"] * 65}, "at most 64 items, got 65"),
                ("logit_bias", {"logit_bias": {"the": 1}}, "keys must be token ids, got 'the'"),
                ("logit_bias", {"logit_bias": {"5": 1, "05": -100}}, "token ids, got '05'"),
                ("logit_bias.5", {"logit_bias": {"5": 101}}, "less than or equal to 100"),
                ("logit_bias", {"logit_bias": {"99999": 1}}, "99999 is not one of the model's"),
                ("stop_token_ids", {"stop_token_ids": [99999]}, "99999 is not one of the model's"),
                ("top_logprobs", {"logprobs": False, "top_logprobs": 2}, "needs logprobs"),
                ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
                ("prompt_logprobs", {"prompt_logprobs": 21}, "less than or equal to 20"),
                ("prompt_logprobs", {"prompt_logprobs": -1}, "greater than or equal to 0"),
                ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, "not with stream: true"),
                ("stream_options", {"stream_options": {}}, "needs stream: true"),
                (
                    "stream_options.continuous_usage_stats",
                    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                    "needs include_usage: true",
                ),
                ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}, "unknown field"),
                ("max_tokens", {"max_tokens": 0}, "greater than or equal to 1"),
                ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}, "contradicts"),
                ("min_tokens", {"max_tokens": 3, "min_tokens": 4}, "must be from 0 to max_tokens"),
                ("messages", {"messages": []}, "at least 1 item(s), got 0"),
                ("messages", {"messages": "Hello"}, "must be a valid list, got 'Hello'"),
                ("messages.0.role", {"messages": [{"role": "robot", "content": ""}]}, "got 'robot'"),
                ("messages.0.role", {"messages": [{"content": ""}]}, "missing"),
                ("messages.0.content", {"messages": [{"role": "user"}]}, "missing"),
                ("messages.0.content.0.type", part(type="image_url"), "must be 'text', got 'image_url'"),
                ("messages.0.content.0.text", part(type="text"), "missing"),
                ("response_format.type", {"response_format": {"type": "yaml"}}, "got 'yaml'"),
                ("response_format.type", {"response_format": {}}, "missing"),
                ("response_format.json_schema", {"response_format": {"type": "json_schema"}}, "missing"),
                (
                    "structured_outputs",
                    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
                    "set exactly one of json, regex, choice and grammar, got 2",
                ),
                (
                    "structured_outputs",
                    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
                    "contradicts response_format",
                ),
                ("guided_json", {"guided_json": {}}, "use structured_outputs or response_format"),
                ("guided_choice", {"guided_choice": ["a"]}, "use structured_outputs or response_format"),
                ("store", {"store": True}, "only false is supported, got true"),
                ("store", {"store": 0}, "only false is supported, got 0"),
                ("service_tier", {"service_tier": "flex"}, "must be 'auto' or 'default', got 'flex'"),
                ("modalities.0", {"modalities": ["audio"]}, "must be 'text', got 'audio'"),
                ("routing_mode", {"routing_mode": "magic"}, "got 'magic'"),
                ("request_id", {"request_id": "a\nb"}, "pattern"),
                ("model", {"model": 5}, "must be a valid string, got 5"),
            ],
        ),
        (
            "/v1/completions",
            TEXT,
            [
                ("guided_regex", {"guided_regex": "a+"}, "use structured_outputs or response_format"),
                ("guided_grammar", {"guided_grammar": "a"}, "use structured_outputs or response_format"),
                ("prompt", {"prompt": None}, "must be a valid string"),
                ("prompt.0.1", {"prompt": [[1, "a"], [2]]}, "must be a valid integer"),
                ("prompt", {"prompt": []}, "at least 1"),
                ("prompt", {"prompt": ""}, "must not be empty"),
                ("prompt.1", {"prompt": ["a", ""]}, "must not be empty"),
                ("prompt.1", {"prompt": [[1], [99999]]}, "99999 is not one of the model's"),
                ("prompt.1", {"prompt": [1, "a"]}, "got 'a'"),
                ("prompt.0", {"prompt": [-1]}, "greater than or equal to 0"),
                ("prompt", {"prompt": [99999]}, "99999 is not one of the model's"),
                ("prompt", {"prompt": ["a"] * 129}, "at most 128 items, got 129"),
                (
                    "n",
                    {"prompt": ["a", "b"], "n": 65},
                    "2 prompts with 65 answers each exceed the limit of 128",
                ),
                ("best_of", {"best_of": 2}, "must equal n (1), got 2"),
                ("logprobs", {"logprobs": True}, "must be a valid integer"),
                (
                    "prompt_logprobs",
                    {"prompt_logprobs": 2, "logprobs": 1, "echo": True},
                    "contradicts logprobs (1)",
                ),
                ("max_tokens", {"max_tokens": 0}, "greater than or equal to 1 without echo"),
                (
                    "min_tokens",
                    {"max_tokens": 0, "echo": True, "min_tokens": 1},
                    "must be 0 with max_tokens 0",
                ),
            ],
        ),
    ],
)
async def test_an_invalid_field_is_named_with_its_problem(
    folder: Path, path: str, body: dict[str, Any], refused: list[tuple[str, dict[str, Any], str]]
) -> None:
    errors = await refusals(folder, path, [body | fields for _, fields, _ in refused])
    for (param, _, complaint), error in zip(refused, errors, strict=True):
        assert (error["status"], error["type"]) == (400, "invalid_request_error")
        assert error["param"] == param, error
        assert error["message"].startswith(f"{param}: ")
        assert complaint in error["message"]


async def test_programs_know_these_errors_by_their_code(folder: Path) -> None:
    bodies = [CHAT | {"model": "gpt-4"}, CHAT | {"messages": [{"role": "user", "content": "x" * 1000}]}]
    unknown, too_long = await refusals(folder, "/v1/chat/completions", bodies)
    assert (unknown["status"], unknown["code"], unknown["param"]) == (404, "model_not_found", "model")
    assert "use 'tiny'" in unknown["message"]
    assert (too_long["status"], too_long["code"]) == (400, "context_length_exceeded")
    assert too_long["param"] == "messages"


async def test_an_invalid_deadline_is_refused(folder: Path) -> None:
    header = "x-request-timeout-ms"
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        for value in ("soon", "0", "-5", "1e9", str(10**12)):
            answer = await client.post("/v1/completions", json=TEXT, headers={header: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, header), value


async def test_one_model_is_there_and_others_are_not(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        answer = await client.get("/v1/models/some/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
