"""Protobuf at the edge: defaults, limits, and every bad field by its name."""

import math
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import sampling_pb2
from gateway import convert
from gateway.routing.placement import Mode
from gateway.text import ChatMessage

LIMITS = convert.ModelLimits(max_model_len=100, vocab_size=50)


def params_of(num_prompt_tokens: int = 10, **fields: Any) -> Any:
    return convert.sampling_params_from(sampling_pb2.SamplingParams(**fields), num_prompt_tokens, LIMITS)


def test_unset_fields_take_their_defaults() -> None:
    params = params_of()
    assert (params.max_tokens, params.temperature, params.top_p, params.repetition_penalty) == (
        90,
        1.0,
        1.0,
        1.0,
    )
    assert (params.seed, params.logprobs) == (None, None)


def test_set_fields_arrive_as_they_were_meant() -> None:
    params = params_of(
        max_tokens=5, temperature=0.0, top_p=0.9, seed=0, logprobs=0, logit_bias={3: -1.1}, stop=["x"]
    )
    assert (params.max_tokens, params.temperature, params.top_p, params.seed, params.logprobs) == (
        5,
        0,
        0.9,
        0,
        0,
    )
    assert (params.logit_bias, params.stop) == ({3: -1.1}, ("x",))


def test_max_tokens_never_exceed_what_the_model_has_room_for() -> None:
    assert params_of(95, max_tokens=50).max_tokens == 5


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": math.nan}),
        ("top_p", {"top_p": 0.0}),
        ("min_p", {"min_p": math.inf}),
        ("presence_penalty", {"presence_penalty": 3.0}),
        ("logprobs", {"logprobs": 100}),
        ("seed", {"seed": 2**63}),
        ("stop", {"stop": [""]}),
        ("stop_token_ids", {"stop_token_ids": [50]}),
        ("logit_bias", {"logit_bias": {50: 1.0}}),
        ("logit_bias", {"logit_bias": {5: math.nan}}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ],
)
def test_a_bad_sampling_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (pb.GenerateRequest(text="hi"), "hi"),
        (pb.GenerateRequest(text=""), ""),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])), (1, 2)),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.Chat.Message(role="user", content="hi")])),
            [ChatMessage("user", "hi")],
        ),
    ],
)
def test_each_kind_of_prompt(request_: pb.GenerateRequest, prompt: convert.Prompt) -> None:
    assert convert.prompt_from(request_) == prompt


@pytest.mark.parametrize(
    ("field", "request_"), [("prompt", pb.GenerateRequest()), ("chat", pb.GenerateRequest(chat=pb.Chat()))]
)
def test_a_missing_prompt_is_named(field: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.prompt_from(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((), "it is empty"),
        ((1,) * 100, "100 tokens leave no room"),
        ((49, 50), "50 is not among the model's 50"),
    ],
)
def test_prompts_that_the_model_cannot_take(token_ids: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        convert.check_prompt(token_ids, LIMITS)


def test_routing_modes() -> None:
    assert convert.mode_from(pb.GenerateRequest()) is None
    assert convert.mode_from(pb.GenerateRequest(routing_mode=pb.ROUTING_MODE_LOCAL)) is Mode.LOCAL
    with pytest.raises(InvalidRequest, match="routing_mode"):
        convert.mode_from(pb.GenerateRequest(routing_mode=77))  # type: ignore[arg-type]
