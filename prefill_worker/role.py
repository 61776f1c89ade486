"""PrefillRole: the role that computes prompts for other workers; knows neither its engine nor the decode worker."""

from baton.errors import Overloaded
from baton.kv import TransferRole
from baton.request import EngineRequest
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole


class PrefillRole:
    """Accepts only prefill requests of hand-overs. Is drained once the last block of these hand-overs was read.

    The role does not decide when to hand over: `scheduler/request.py` limits a producing request to one new token, and
    `scheduler/limits.py` says with which status the request ends then.
    """

    kind = WorkerRole.PREFILL

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting

    def admit(self, request: EngineRequest, counts: RequestCounts) -> None:
        transfer = request.kv_transfer
        if transfer is None or transfer.role is not TransferRole.PRODUCER:
            # No error: the sender does not know yet that the worker changed its role.
            raise Overloaded(
                "this worker is a prefill worker now: it only computes prompts for decode workers", 1.0
            )
        if counts.waiting >= self._max_waiting:
            raise Overloaded(
                f"{counts.waiting} prompts wait for prefill; the limit is {self._max_waiting} "
                "(gateway.max_in_flight)",
                1.0,
            )

    def is_drained(self, counts: RequestCounts, blocks: KVBlockCounts) -> bool:
        return counts.running == counts.waiting == 0 and blocks.leased == 0
