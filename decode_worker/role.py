"""DecodeRole: the role that decodes, with KV from other workers or its own; knows no engine."""

from baton.errors import Overloaded
from baton.kv import TransferRole
from baton.request import EngineRequest
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole


class DecodeRole:
    """Accepts the decode request of a hand-over, or a whole request to compute by itself.

    The request says what to load; the scheduler chooses when to load, once blocks are free.
    """

    kind = WorkerRole.DECODE

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting

    def admit(self, request: EngineRequest, counts: RequestCounts) -> None:
        transfer = request.kv_transfer
        if transfer is not None and transfer.role is not TransferRole.CONSUMER:
            # No error: the sender does not know yet that the worker changed its role.
            raise Overloaded(
                "this worker is a decode worker now: it does not compute prompts for other workers", 1.0
            )
        waiting = counts.waiting + counts.waiting_for_remote_kvs
        if waiting >= self._max_waiting:
            raise Overloaded(
                f"{waiting} requests wait to decode; the limit is {self._max_waiting} (gateway.max_in_flight)",
                1.0,
            )

    def is_drained(self, counts: RequestCounts, blocks: KVBlockCounts) -> bool:
        return counts.total == 0 and blocks.quarantined == 0
