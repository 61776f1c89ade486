"""Ending: ends requests in any state. When a request ends, its blocks are freed, or kept for a transfer."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from baton.request import ErrorKind, FinishReason, RequestOutput
from baton.step import ClientOutputs
from scheduler.admission import Admission
from scheduler.preemption import Preemption
from scheduler.remote import RemotePrompts
from scheduler.request import FINISH_REASONS, Request, RequestStatus
from scheduler.running import Running
from scheduler.swap import SwapSpace

_QUEUED = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_FSM, RequestStatus.PREEMPTED}


class Ending:
    """Removes requests from every queue, and from `requests`, which has the unfinished requests."""

    def __init__(
        self,
        requests: dict[str, Request],
        admission: Admission,
        running: Running,
        remote: RemotePrompts,
        swap: SwapSpace,
        preemption: Preemption,
        counters: Counter[str],
    ) -> None:
        self._requests = requests
        self._admission = admission
        self._running = running
        self._remote = remote
        self._swap = swap
        self._preemption = preemption
        self._counters = counters
        self._has_ended_running = False
        self.ended_since_plan: set[str] = set()
        """Requests that have ended since the last plan; the next plan tells the runner."""

    def finish(
        self,
        request_ids: Iterable[str],
        status: RequestStatus,
        outputs: ClientOutputs,
        error: str | None = None,
        error_kind: ErrorKind = ErrorKind.INTERNAL,
    ) -> None:
        """Ends requests in any state. Ignores unknown ids, which belong to requests that ended before."""
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self._unqueue(request)
                self.end(request, status, outputs, error, error_kind)
        self.drop_from_running()

    def fail(
        self, requests: list[Request], failed: Mapping[str, str], kind: ErrorKind, outputs: ClientOutputs
    ) -> None:
        """Ends each request for which `failed` has a reason."""
        for request in requests:
            if request.request_id in failed and not request.is_finished:
                self._unqueue(request)
                self.end(request, RequestStatus.FINISHED_ERROR, outputs, failed[request.request_id], kind)

    def end_given_back(self, outputs: ClientOutputs) -> None:
        """Ends victims that continue on other workers, once none of their tokens is in flight."""
        for request in list(self._preemption.given_back.values()):
            if not request.num_output_placeholders:
                status = RequestStatus.FINISHED_GIVEN_BACK
                self.end(request, status, outputs, "this worker needed its blocks for other requests")

    def finish_with(
        self, request: Request, status: RequestStatus, output: RequestOutput, outputs: ClientOutputs
    ) -> None:
        """Ends a request with its last token."""
        self._unqueue(request)
        if status is RequestStatus.FINISHED_HANDED_OVER:
            self._remote.keep_first_token(request, output)
        self._end_and_free(request, status, output, outputs)

    def end(
        self,
        request: Request,
        status: RequestStatus,
        outputs: ClientOutputs,
        error: str | None = None,
        error_kind: ErrorKind = ErrorKind.INTERNAL,
    ) -> None:
        """Ends a request without a new token. The request must have left its queue, but may be running."""
        if status is RequestStatus.FINISHED_GIVEN_BACK:
            error_kind = ErrorKind.GIVEN_BACK
            self._counters["requests_given_back"] += 1
        output = RequestOutput(
            request_id=request.request_id,
            first_position=request.num_output_tokens,
            error=error,
            error_kind=error_kind,
        )
        self._end_and_free(request, status, output, outputs)

    def drop_from_running(self) -> None:
        """Removes ended requests from the running ones. Call it after running requests have ended."""
        if self._has_ended_running:
            self._running.drop_stopped()
            self._has_ended_running = False

    def _end_and_free(
        self, request: Request, status: RequestStatus, last: RequestOutput, outputs: ClientOutputs
    ) -> None:
        """Ends a request that has left its queue. Adds the finish reason to its last output."""
        self._has_ended_running |= request.status is RequestStatus.RUNNING
        request.move_to(status)
        self._remote.free_or_hold(request)
        self._swap.discard(request)
        self._preemption.given_back.pop(request.request_id, None)
        del self._requests[request.request_id]
        self.ended_since_plan.add(request.request_id)
        reason = FINISH_REASONS[status]
        stop_token_id = request.all_token_ids[-1] if reason is FinishReason.STOP else None
        outputs[request.client_id].append(replace(last, finish_reason=reason, stop_token_id=stop_token_id))

    def _unqueue(self, request: Request) -> None:
        """Removes a request from the queue it waits in, if any."""
        if request.status in _QUEUED and not self._remote.received.remove(request):
            self._admission.remove(request)
