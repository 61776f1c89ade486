"""The scheduler's whole view of KV transfer: six calls, which `worker.kv_connector` implements."""

from typing import Any, Protocol

from baton.step import KVConnectorOutput, SchedulerOutput
from scheduler.request import Request


class KVConnector(Protocol):
    """All calls but `build_connector_meta` and `update_connector_output` concern requests with `kv_transfer` only.

    No call blocks, and no call raises because of a peer. `worker/host.py` connects the scheduler and the
    connector.
    """

    def request_added(self, request: Request) -> None:
        """The request is queued; it may get blocks much later."""
        ...

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many of its initial tokens beyond `num_computed_tokens` (a whole number of blocks) can be loaded.

        The flag says that loading is asynchronous: the request waits in WAITING_FOR_REMOTE_KVS. None means "not known
        yet, ask again next step". The call has no side effects and may be repeated. It is not repeated once a load
        has started, unless that load was postponed.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        """Blocks were granted for a load of `num_external_tokens` > 0; `block_ids` are those still to be filled."""
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Receives the output of the worker half, before the scheduler acts on it."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Commands of this step for the worker half, or None. Does not change the plan.

        Called at the end of every `schedule()`. For a producer, the connector reads from the plan which
        blocks this step will complete.
        """
        ...

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        """The request ended in any way; `block_ids` are all the blocks it holds.

        True: a transfer may still read or write the blocks. They are freed when `KVConnectorOutput` names the
        request. False: the scheduler frees the blocks now, if there are any.
        """
        ...
