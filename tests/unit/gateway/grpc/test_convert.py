"""Protobuf at the edge: defaults, limits, and every bad field by its name."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.request import FinishReason, PackedLogprobs, TokenLogprobs
from baton.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MODEL_DEFAULTS,
    GrammarKind,
    StructuredOutput,
)
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import sampling_pb2
from gateway.conversation import ChatMessage, Conversation
from gateway.grpc import convert, vllm_convert
from gateway.grpc.generated import vllm_engine_pb2
from gateway.preprocess import UNLIMITED, Prompt
from gateway.requests.request import Delta, Finish
from gateway.routing.placement import Mode, Placement
from gateway.timing.request_times import HandoverParts, Timing, TtftParts
from tests.factories.answers import finish_of


def params_of(**fields: Any) -> Any:
    return convert.sampling_params_from(sampling_pb2.SamplingParams(**fields))


def test_unset_fields_take_their_defaults() -> None:
    params = params_of()
    assert (params.max_tokens, params.temperature, params.top_p, params.repetition_penalty) == (
        UNLIMITED,
        1.0,
        1.0,
        1.0,
    )
    assert (params.seed, params.logprobs) == (None, None)


def test_a_field_that_a_message_does_not_have_is_unset() -> None:
    assert convert.unset_in(pb.TokenIds()) == list(MODEL_DEFAULTS)
    assert convert.unset_in(sampling_pb2.SamplingParams(top_k=0, min_p=0.0)) == [
        name for name in MODEL_DEFAULTS if name not in ("top_k", "min_p")
    ]


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


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("json_schema", GrammarKind.JSON_SCHEMA),
        ("regex", GrammarKind.REGEX),
        ("lark_grammar", GrammarKind.LARK),
    ],
)
def test_each_kind_of_grammar(field: str, kind: GrammarKind) -> None:
    assert params_of().structured_output is None
    assert params_of(**{field: "x"}).structured_output == StructuredOutput(kind, "x")


def test_log_probabilities_arrive_as_they_are() -> None:
    delta = Delta((3,), logprobs=(TokenLogprobs(3, -0.5, 2, ((4, -0.25), (3, -0.5))),))
    (sent,) = convert.delta_to_response("r", delta).logprobs
    assert (sent.token_id, sent.logprob, sent.rank) == (3, -0.5, 2)
    assert [(each.token_id, each.logprob) for each in sent.top] == [(4, -0.25), (3, -0.5)]


def test_log_probabilities_of_a_prompt_arrive_as_they_are() -> None:
    assert params_of().prompt_logprobs is None
    assert params_of(prompt_logprobs=0).prompt_logprobs == 0
    response = convert.delta_to_response(
        "r", Delta(prompt_logprobs=PackedLogprobs.of([TokenLogprobs(3, -0.5, 2, ((4, -0.25),))]))
    )
    (sent,) = response.prompt_logprobs
    assert (sent.token_id, sent.logprob, sent.rank) == (3, -0.5, 2)
    assert [(each.token_id, each.logprob) for each in sent.top] == [(4, -0.25)]
    assert not response.logprobs


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
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("seed", {"seed": 2**63}),
        ("stop", {"stop": [""]}),
        ("logit_bias", {"logit_bias": {5: math.nan}}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ],
)
def test_a_bad_sampling_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_as_such(value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^temperature: must be a finite number, got {value}$"):
        params_of(temperature=value)


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (pb.GenerateRequest(text="hi"), "hi"),
        (pb.GenerateRequest(text=""), ""),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])), (1, 2)),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.Chat.Message(role="user", content="hi")])),
            Conversation((ChatMessage("user", "hi"),)),
        ),
    ],
)
def test_each_kind_of_prompt(request_: pb.GenerateRequest, prompt: Prompt) -> None:
    assert convert.prompt_from(request_) == prompt


@pytest.mark.parametrize(
    ("field", "request_"), [("prompt", pb.GenerateRequest()), ("chat", pb.GenerateRequest(chat=pb.Chat()))]
)
def test_a_missing_prompt_is_named(field: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.prompt_from(request_)
    assert caught.value.field == field


def test_routing_modes() -> None:
    assert convert.mode_from(pb.GenerateRequest()) is None
    assert convert.mode_from(pb.GenerateRequest(routing_mode=pb.ROUTING_MODE_LOCAL)) is Mode.LOCAL
    with pytest.raises(InvalidRequest, match="routing_mode"):
        convert.mode_from(pb.GenerateRequest(routing_mode=77))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", [5] * (MAX_STOP_TOKEN_IDS + 1)),
    ],
)
def test_too_many_of_anything_are_counted_before_anything_is_made_of_them(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SamplingParams", never)
    monkeypatch.setattr(convert, "exact", never)
    monkeypatch.setattr(vllm_convert, "exact", never)
    for kind, module in ((sampling_pb2, convert), (vllm_engine_pb2, vllm_convert)):
        message: Any = kind.SamplingParams(**{field: value})
        with pytest.raises(InvalidRequest, match=f"{field}: must have at most") as caught:
            module.sampling_params_from(message)
        assert caught.value.field == field


def test_choices_that_are_too_long_are_refused_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_convert, "re", None)
    message = vllm_engine_pb2.SamplingParams()
    message.choice.choices.extend(["+" * 1000] * 1000)
    with pytest.raises(InvalidRequest, match="choice: its texts are larger than 100000 bytes"):
        vllm_convert.sampling_params_from(message)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("that is work")


def test_one_call_ends_a_bounded_number_of_requests() -> None:
    ids = [str(number) for number in range(convert.MAX_ABORTED)]
    assert convert.ids_to_abort(ids) == ids
    assert convert.ids_to_abort(["b", "a", "b"]) == ["b", "a"], "each is ended and counted once"
    with pytest.raises(InvalidRequest, match="request_ids: one call can end at most 4096 requests, got 4097"):
        convert.ids_to_abort(["a"] * (convert.MAX_ABORTED + 1))


def test_every_part_of_the_times_arrives() -> None:
    ttft = TtftParts(
        gateway_s=1.0,
        queue_s=2.0,
        failed_attempts_s=3.0,
        worker_queue_s=4.0,
        transfer_exposed_s=5.0,
        prefill_s=6.0,
    )
    handover = HandoverParts(transfer_exposed_s=7.0, first_step_s=8.0, gateway_s=9.0)
    timing = timing_of(ttft, handover)
    assert {field.name: value for field, value in timing.ttft_parts.ListFields()} == asdict(ttft)
    assert {field.name: value for field, value in timing.handover_parts.ListFields()} == asdict(handover)
    assert (timing.ttft_s, timing.handover_s) == (21.0, 24.0)
    without = timing_of(None, None)
    assert not without.HasField("ttft_parts")
    assert not without.HasField("handover_parts")


def timing_of(ttft: TtftParts | None, handover: HandoverParts | None) -> pb.Timing:
    timing = Timing(21.0, (24.0,), 0.0, 0.0, 0.0, 0, 24.0, 24.0, 45.0, 0.0, "", (), ttft, handover)
    finish = Finish(FinishReason.LENGTH, None, None, 3, 2, 0, timing, Placement(Mode.LOCAL, None, "d0"), 1)
    return convert.delta_to_response("a", Delta(finish=finish)).finish.timing


def test_usage_counts_tokens_and_drafts() -> None:
    finish = finish_of(num_completion_tokens=9, num_draft_tokens=8, num_accepted_draft_tokens=6)
    response = convert.delta_to_response("a", Delta(finish=finish), num_reasoning_tokens=4)
    usage = response.finish.usage
    assert {field.name: value for field, value in usage.ListFields()} == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "cached_tokens": 3,
        "draft_tokens": 8,
        "accepted_draft_tokens": 6,
        "reasoning_tokens": 4,
    }
