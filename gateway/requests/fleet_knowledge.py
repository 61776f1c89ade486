"""FleetKnowledge: what the gateway learns about workers from heartbeats, outputs and losses; pure."""

import logging
from dataclasses import replace

from baton.request import FinishReason, RequestOutput
from baton.transfer import TransferEventKind, TransferRecord
from baton.worker import WorkerStatus
from gateway.requests.attempt import Attempt
from gateway.routing.avoided_pairs import AvoidedPairs
from gateway.routing.prefill_times import MEMORY_S, PrefillTimes
from gateway.routing.router import Router
from gateway.workers.worker_listener import LossCause

logger = logging.getLogger(__name__)


class FleetKnowledge:
    """What the dispatcher and the router know about the fleet. Times must not run backwards."""

    def __init__(self, router: Router) -> None:
        self.prefill_times = PrefillTimes()
        self.avoided_pairs = AvoidedPairs()
        self._router = router
        self._decode_steps: dict[str, tuple[float, float]] = {}
        """By worker: the reported time of a decode step, and when this value last changed or the worker last had a
        request, whichever is later."""

    def on_report(self, status: WorkerStatus, now: float) -> None:
        if self._router.role_of(status.ref.name) not in (None, status.role):
            self.avoided_pairs.forget(status.ref.name)  # with its new role, it belongs to other pairs
        self._router.on_status(self._without_old_step(status, now))
        self.prefill_times.on_rate(status.ref.name, status.load.prefill_tokens_per_s, now)

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str, num_requests: int) -> bool:
        """`num_requests`: how many requests ran on the worker. Returns whether the worker left as planned."""
        was_draining, extra = self._router.is_draining(worker), {"worker": worker}
        # The fleet view may overtake the heartbeat that reports the drain.
        has_left = was_draining or cause is LossCause.LEFT
        if has_left and num_requests == 0:
            how = " after its drain" if was_draining else ""
            logger.info("worker %s has left%s: %s", worker, how, reason, extra=extra)
        elif num_requests == 0:
            logger.warning(
                "worker %s, which had no requests of this gateway, is lost: %s", worker, reason, extra=extra
            )
        else:
            logger.warning("lost the requests on worker %s: %s", worker, reason, extra=extra)
        self._router.on_worker_lost(worker)
        self.prefill_times.forget(worker)
        self._decode_steps.pop(worker, None)
        self.avoided_pairs.forget(worker)
        return has_left

    def _without_old_step(self, status: WorkerStatus, now: float) -> WorkerStatus:
        """The report, without the time of a decode step if the worker has had no request for MEMORY_S.

        An idle worker repeats the time of its last steps. If these steps were slow by chance, the worker would get no
        request that could show its present speed. Prefill rates need no such rule: requests queue at faster workers
        until a slower worker costs less, and gets requests again.
        """
        step_s = status.load.decode_step_s
        known, changed_at = self._decode_steps.get(status.ref.name, (0.0, now))
        if step_s != known or status.requests.running:
            self._decode_steps[status.ref.name] = step_s, now
        elif now - changed_at > MEMORY_S:
            return replace(status, load=replace(status.load, decode_step_s=0.0))
        return status

    def on_transfer(self, attempt: Attempt, transfer: TransferRecord, now: float) -> None:
        """A hand-over of this attempt has ended."""
        pair = attempt.placement.pair
        assert pair is not None, f"{attempt} has no hand-over"
        prefill, _ = pair
        if transfer.is_link_failure:
            worker = self._router.ready_worker(prefill)
            if attempt.is_prefill_lost or worker is None or worker.status.ref != attempt.refs[prefill]:
                return  # the worker was lost meanwhile, which explains the failure
            self.avoided_pairs.failed(pair, attempt.began_at, transfer.reason, now)
        elif transfer.at(TransferEventKind.VERIFIED) is not None:
            self.avoided_pairs.works(pair)

    def on_stage_times(
        self, attempt: Attempt, worker: str, output: RequestOutput, num_prompt_tokens: int, now: float
    ) -> None:
        """Learns from an output's stage times how long transfers and prompts take."""
        times = output.stage_times
        assert times is not None
        is_whole = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if worker == attempt.placement.decode and is_whole and self._has_same_incarnations(attempt):
            self._router.measured(attempt.placement, times)
        if output.token_ids and output.first_position == attempt.num_tokens_before and times.prefill_s > 0.0:
            num_computed = num_prompt_tokens + attempt.num_tokens_before - output.num_cached_tokens
            self.prefill_times.computed(worker, num_computed, times.prefill_s, now)

    def _has_same_incarnations(self, attempt: Attempt) -> bool:
        """Whether the attempt's workers are still the same incarnations. Other incarnations may have other links."""
        workers = {name: self._router.ready_worker(name) for name in attempt.refs}
        return all(worker and worker.status.ref == attempt.refs[name] for name, worker in workers.items())
