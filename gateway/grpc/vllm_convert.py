"""vLLM's token-level messages <-> our own values.

Unsupported fields are refused, and the error names the field.
"""

import re
from collections.abc import Sequence

from baton.errors import InvalidRequest
from baton.request import TokenLogprobs
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, SamplingParams, StructuredOutput
from gateway.choices import MAX_CHOICES
from gateway.grpc.convert import check_counts, common_sampling, exact
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.preprocess import Prompt
from gateway.requests.request import Delta, Finish

ELSEWHERE = "this gateway chooses workers and hands KV over by itself; remove the field"
TEXT_ONLY = "models here read only text; remove the field"

UNSERVED = {
    "kv_transfer_params": ELSEWHERE,
    "kv_transfer_params_json": ELSEWHERE,
    "data_parallel_rank": ELSEWHERE,
    "mm_inputs": TEXT_ONLY,
    "extra_mm_inputs": TEXT_ONLY,
    "media_refs": TEXT_ONLY,
}
"""Fields of a request that are not supported, and why."""

MAX_CHOICE_BYTES = MAX_GRAMMAR_CHARACTERS
ANY_JSON_OBJECT = '{"type": "object"}'


def prompt_from(request: pb.GenerateRequest) -> Prompt:
    for field, _ in request.ListFields():
        if field.name in UNSERVED:
            raise InvalidRequest(field.name, UNSERVED[field.name])
    match request.WhichOneof("input"):
        case "tokenized":
            return tuple(request.tokenized.input_ids)
        case "text":
            return request.text
        case _:
            raise InvalidRequest("input", "set one of tokenized and text")


def sampling_params_from(message: pb.SamplingParams) -> SamplingParams:
    """Converts sampling parameters and fills in vLLM's defaults; InvalidRequest names the field.

    Three fields are accepted with any value. `spaces_between_special_tokens` and `include_stop_str_in_output`
    change vLLM's text but not its tokens. Grammars always apply from the first token, so
    `grammar_from_first_token` has no effect.
    """
    _refuse_unsupported(message)
    check_counts(message)
    return common_sampling(
        message,
        top_p=exact(message.top_p) or 1.0,
        repetition_penalty=exact(message.repetition_penalty) or 1.0,
        seed=message.seed % 2**32 if message.HasField("seed") else None,
        structured_output=_structured_output_from(message),
    )


def _refuse_unsupported(message: pb.SamplingParams) -> None:
    if message.n > MAX_CHOICES:
        raise InvalidRequest("n", f"must be at most {MAX_CHOICES}, got {message.n}")
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(
            "truncate_prompt_tokens", "not supported; truncate the prompt before you send it"
        )


def _structured_output_from(message: pb.SamplingParams) -> StructuredOutput | None:
    match message.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return StructuredOutput(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "regex":
            return StructuredOutput(GrammarKind.REGEX, message.regex)
        case "grammar":
            return StructuredOutput(GrammarKind.LARK, message.grammar)
        case "json_object":
            return StructuredOutput(GrammarKind.JSON_SCHEMA, ANY_JSON_OBJECT) if message.json_object else None
        case "choice":
            if not message.choice.choices:
                raise InvalidRequest("choice", "must offer at least one choice")
            if message.choice.ByteSize() > MAX_CHOICE_BYTES:
                raise InvalidRequest("choice", f"its texts are larger than {MAX_CHOICE_BYTES} bytes together")
            return StructuredOutput(GrammarKind.REGEX, "|".join(map(re.escape, message.choice.choices)))
        case other:
            raise InvalidRequest(
                other, "use json_schema, regex, grammar (in Lark's notation), json_object or choice"
            )


def delta_to_chunk(
    index: int, delta: Delta, num_prompt_tokens: int, input_logprobs: pb.InputLogProbs | None = None
) -> pb.GenerateResponse:
    """Converts one delta.

    As in vLLM, `completion_tokens` counts this chunk only; only the last chunk has `cached_tokens`.
    """
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=num_prompt_tokens,
        completion_tokens=len(delta.token_ids),
        cached_tokens=delta.finish.num_cached_tokens if delta.finish else 0,
        output_logprobs=logprobs_to_message(delta.logprobs),
        input_logprobs=input_logprobs,
        index=index,
    )
    return pb.GenerateResponse(chunk=chunk)


def to_complete(index: int, delta: Delta, finish: Finish) -> pb.GenerateResponse:
    """The last response of a stream. As in vLLM, it repeats the tokens of the last chunk."""
    complete = end_without_tokens(index, len(delta.token_ids), finish)
    complete.output_ids.extend(delta.token_ids)
    if (logprobs := logprobs_to_message(delta.logprobs)) is not None:
        complete.output_logprobs.CopyFrom(logprobs)
    return pb.GenerateResponse(complete=complete)


def end_without_tokens(index: int, num_tokens: int, finish: Finish) -> pb.GenerateComplete:
    """All fields of a last response except its tokens."""
    complete = pb.GenerateComplete(
        finish_reason=finish.reason.value,
        prompt_tokens=finish.num_prompt_tokens,
        completion_tokens=num_tokens,
        cached_tokens=finish.num_cached_tokens,
        index=index,
    )
    if finish.matched_stop is not None:
        complete.matched_stop_str = finish.matched_stop
    elif finish.stop_token_id is not None:
        complete.matched_token_id = finish.stop_token_id
    return complete


def logprobs_to_message(logprobs: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.logprob for position in logprobs],
        token_ids=[position.token_id for position in logprobs],
        top_logprobs=map(_top_to_message, logprobs),
    )


def input_logprobs_to_message(
    logprobs: Sequence[TokenLogprobs], first_token_id: int | None
) -> pb.InputLogProbs:
    """Converts log-probabilities of a prompt's tokens. `first_token_id`: the prompt's first token, which has no
    log-probability, if it comes directly before these tokens; otherwise None."""
    first = () if first_token_id is None else (first_token_id,)
    return pb.InputLogProbs(
        token_logprobs=[
            *(pb.InputTokenLogProb() for _ in first),
            *(pb.InputTokenLogProb(value=position.logprob) for position in logprobs),
        ],
        token_ids=[*first, *(position.token_id for position in logprobs)],
        top_logprobs=[*(pb.TopLogProbs() for _ in first), *map(_top_to_message, logprobs)],
    )


def _top_to_message(position: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in position.top], token_ids=[token_id for token_id, _ in position.top]
    )
