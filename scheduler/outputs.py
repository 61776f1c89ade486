"""OutputsByClient: collects a step's outputs, client by client."""

from collections import defaultdict
from dataclasses import replace

from baton.request import FinishReason, RequestOutput
from baton.step import EngineCoreOutputs
from scheduler.request import FINISH_REASONS, Request


class OutputsByClient:
    """Filled while a step's results are processed, then read once."""

    def __init__(self) -> None:
        self._outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)

    def add(self, request: Request, output: RequestOutput) -> None:
        self._outputs[request.client_id].append(output)

    def add_last(self, request: Request, output: RequestOutput) -> None:
        """The request has just finished: adds the reason to the output."""
        reason = FINISH_REASONS[request.status]
        is_stop = reason is FinishReason.STOP
        self.add(
            request,
            replace(
                output,
                finish_reason=reason,
                stop_token_id=request.all_token_ids[-1] if is_stop else None,
            ),
        )

    def by_client(self) -> dict[str, EngineCoreOutputs]:
        return {client_id: EngineCoreOutputs(tuple(outputs)) for client_id, outputs in self._outputs.items()}
