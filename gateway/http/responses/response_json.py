"""ResponseJson: writes one response in its present state, as JSON in pieces."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.sampling import SamplingParams
from gateway.http.responses.answers import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
)
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.output import OutputItem
from gateway.http.responses.tools import shown_tools


@dataclass(frozen=True, slots=True)
class ResponseState:
    """The fields that change while a response is generated."""

    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None


BEGUN = ResponseState()


class ResponseJson:
    """Writes one response. The JSON of the request's own fields is made once."""

    def __init__(
        self,
        body: ResponseRequest,
        params: SamplingParams,
        response_id: str,
        created_at: int,
        *,
        is_stored: bool,
    ) -> None:
        self.id = response_id
        head = {"id": response_id, "object": "response", "created_at": created_at}
        self._head = json.dumps(head)[:-1]
        self._fields = json.dumps(_repeated(body, params) | {"store": is_stored})[1:]

    def pieces(self, state: ResponseState, items: Sequence[OutputItem]) -> Iterator[str]:
        """The JSON of a ResponseObject, in pieces."""
        fields: dict[str, Any] = asdict(state)
        usage = fields.pop("usage")
        yield f'{self._head},{json.dumps(fields)[1:-1]},"output":['
        for index, item in enumerate(items):
            yield "," if index else ""
            yield from item.json()
        yield f'],"usage":{json.dumps(usage)},'
        yield self._fields


def usage_of(num_input: int, num_cached: int, num_output: int, num_reasoning: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=num_input,
        input_tokens_details=InputTokensDetails(num_cached, 0),
        output_tokens=num_output,
        output_tokens_details=OutputTokensDetails(num_reasoning),
        total_tokens=num_input + num_output,
    )


def _repeated(body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """The request's fields that every response repeats, with defaults for the fields that the request did not set."""
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    shown_format = None if text is None else text.format
    return {
        "model": body.model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "tools": shown_tools(body.tools),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {
            "format": {"type": "text"} if shown_format is None else shown_format.model_dump(by_alias=True)
        },
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "truncation": body.truncation or "disabled",
        "background": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
