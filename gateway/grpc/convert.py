"""Protobuf <-> our own values, for requests; `fleet_messages` does this for fleets."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.errors import InvalidRequest
from baton.request import FinishReason, TokenLogprobs
from baton.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MODEL_DEFAULTS,
    GrammarKind,
    SamplingParams,
    StructuredOutput,
)
from baton.v1 import generation_service_pb2 as generation_pb
from baton.v1 import sampling_pb2 as sampling_pb
from gateway.grpc.chat_convert import conversation_from
from gateway.preprocess import UNLIMITED, Prompt
from gateway.requests.request import Delta, Finish
from gateway.routing.placement import Mode
from gateway.timing.request_times import SeenTransfer

M = TypeVar("M", bound=Message)

MODES = {
    generation_pb.ROUTING_MODE_UNSPECIFIED: None,
    generation_pb.ROUTING_MODE_DISAGGREGATED: Mode.DISAGGREGATED,
    generation_pb.ROUTING_MODE_LOCAL: Mode.LOCAL,
}
FINISH_REASONS = {
    FinishReason.STOP: generation_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb.FINISH_REASON_LENGTH,
}


MAX_ABORTED = 4096
"""One call of Abort has at most this many ids."""

_MAX_ENTRIES = {"logit_bias": MAX_LOGIT_BIAS, "stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS}


def prompt_from(message: generation_pb.GenerateRequest) -> Prompt:
    """The prompt of the request, which must have exactly one of three fields."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "chat":
            return conversation_from(message.chat)
        case _:
            raise InvalidRequest("prompt", "set one of text, token_ids and chat")


def mode_from(message: generation_pb.GenerateRequest) -> Mode | None:
    if message.routing_mode not in MODES:
        raise InvalidRequest("routing_mode", f"unknown value {message.routing_mode}")
    return MODES[message.routing_mode]


def sampling_params_from(message: sampling_pb.SamplingParams) -> SamplingParams:
    """Converts sampling parameters and fills in defaults; InvalidRequest names the field."""
    check_counts(message)
    return common_sampling(
        message,
        top_p=exact(message.top_p) if message.HasField("top_p") else 1.0,
        repetition_penalty=exact(message.repetition_penalty)
        if message.HasField("repetition_penalty")
        else 1.0,
        seed=message.seed if message.HasField("seed") else None,
        structured_output=_structured_output_from(message),
    )


def common_sampling(message: Any, **others: Any) -> SamplingParams:
    """Converts the fields that both services' messages share, and adds `others`. Call check_counts first."""
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else UNLIMITED,
        min_tokens=message.min_tokens,
        temperature=exact(message.temperature) if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        min_p=exact(message.min_p),
        presence_penalty=exact(message.presence_penalty),
        frequency_penalty=exact(message.frequency_penalty),
        logit_bias={token_id: exact(bias) for token_id, bias in message.logit_bias.items()},
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        **others,
    )


def unset_in(message: Any) -> list[str]:
    """The settings that the model's defaults replace. A field that is not `optional` is never replaced: it reads as 0
    whether it was set to 0 or not set."""
    fields = message.DESCRIPTOR.fields_by_name
    return [
        name
        for name in MODEL_DEFAULTS
        if name not in fields or (fields[name].has_presence and not message.HasField(name))
    ]


def check_counts(message: Any) -> None:
    """Checks the lengths of repeated fields before they are converted.

    A message can contain millions of entries. Their conversion would block all other calls.
    """
    for name, limit in _MAX_ENTRIES.items():
        if (count := len(getattr(message, name))) > limit:
            raise InvalidRequest(name, f"must have at most {limit} entries, got {count}")


def ids_to_abort(request_ids: Sequence[str]) -> list[str]:
    """The ids, each once; InvalidRequest if there are too many."""
    if len(request_ids) > MAX_ABORTED:
        raise InvalidRequest(
            "request_ids", f"one call can end at most {MAX_ABORTED} requests, got {len(request_ids)}"
        )
    return list(dict.fromkeys(request_ids))


def _structured_output_from(message: sampling_pb.SamplingParams) -> StructuredOutput | None:
    match message.WhichOneof("structured_output"):
        case "json_schema":
            return StructuredOutput(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "regex":
            return StructuredOutput(GrammarKind.REGEX, message.regex)
        case "lark_grammar":
            return StructuredOutput(GrammarKind.LARK, message.lark_grammar)
        case _:
            return None


def delta_to_response(
    request_id: str,
    delta: Delta,
    events: Sequence[generation_pb.AnswerEvent] = (),
    num_reasoning_tokens: int = 0,
) -> generation_pb.GenerateResponse:
    """Converts one delta. `events`: the events of the delta's text, if the client wants events. `num_reasoning_tokens`:
    the number of reasoning tokens since the answer began.
    """
    response = generation_pb.GenerateResponse(
        request_id=request_id,
        token_ids=delta.token_ids,
        text=delta.shown_text,
        logprobs=[_logprobs_to_message(logprobs) for logprobs in delta.logprobs],
        finish=_finish_to_message(delta.finish, num_reasoning_tokens) if delta.finish else None,
    )
    if events:  # most answers have no events, and this runs for each token
        response.events.extend(events)
    if delta.prompt_logprobs:
        response.prompt_logprobs.extend(map(_logprobs_to_message, delta.prompt_logprobs))
    return response


def _finish_to_message(finish: Finish, num_reasoning_tokens: int) -> generation_pb.Finish:
    timing, placement = finish.timing, finish.placement
    message = generation_pb.Finish(
        reason=FINISH_REASONS[finish.reason],
        usage=generation_pb.Usage(
            prompt_tokens=finish.num_prompt_tokens,
            completion_tokens=finish.num_completion_tokens,
            cached_tokens=finish.num_cached_tokens,
            draft_tokens=finish.num_draft_tokens,
            accepted_draft_tokens=finish.num_accepted_draft_tokens,
            reasoning_tokens=num_reasoning_tokens,
        ),
        timing=filled(
            generation_pb.Timing,
            timing,
            transfers=map(_transfer_to_message, timing.transfers),
            ttft_parts=filled(generation_pb.TtftParts, timing.ttft_parts) if timing.ttft_parts else None,
            handover_parts=filled(generation_pb.HandoverParts, timing.handover_parts)
            if timing.handover_parts
            else None,
        ),
        placement=generation_pb.Placement(
            mode=placement.mode.value,
            prefill=placement.prefill or "",
            decode=placement.decode,
            attempts=finish.num_attempts,
        ),
    )
    if finish.matched_stop is not None:
        message.stop = finish.matched_stop
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


def _transfer_to_message(seen: SeenTransfer) -> generation_pb.Transfer:
    record = seen.record
    events = (generation_pb.TransferEvent(name=event.kind.value, at_s=event.at_s) for event in record.events)
    return filled(
        generation_pb.Transfer,
        record,
        worker=seen.worker,
        role=record.role.value,
        attempt=record.attempt + 1,
        bytes=record.num_bytes,
        events=events,
    )


def _logprobs_to_message(logprobs: TokenLogprobs) -> sampling_pb.TokenLogprobs:
    return sampling_pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[
            sampling_pb.TokenLogprobs.Candidate(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def exact(value: float) -> float:
    """The shortest decimal that rounds to this float32: 0.8 and not 0.800000011920929."""
    return float(f"{value:.7g}") if math.isfinite(value) else value


def filled(kind: type[M], value: object, **others: Any) -> M:
    """A message of this kind. `others` are some of its fields; each of the remaining fields has the value of the
    attribute of `value` with the same name."""
    names = [field.name for field in kind.DESCRIPTOR.fields if field.name not in others]
    return kind(**{name: getattr(value, name) for name in names}, **others)
