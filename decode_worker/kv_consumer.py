"""KVConsumerScheduler: decides which KV blocks a decode worker loads, and into which of its blocks."""

from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.step import KVConnectorOutput
from kv_transfer.commands import AbortLoad, BeginLoad, ImmediateCommand, LoadBlocks
from scheduler import Request


class KVConsumerScheduler:
    """Turns events of consuming requests into commands for the connector's worker half."""

    def __init__(self, block_size: int, groups: KVGroups) -> None:
        self._block_size = block_size
        self._num_groups = groups.num_groups
        self._postponed: set[str] = set()
        """Requests whose load was postponed and cannot continue yet."""
        self._loading: set[str] = set()
        self._commands: list[ImmediateCommand] = []
        self._loads: list[LoadBlocks] = []

    def request_added(self, request: Request) -> None:
        """Announces the request as soon as it is queued, so that its producer does not consider the hand-over lost."""
        assert request.kv_transfer is not None
        self._commands.append(BeginLoad(request.request_id, request.kv_transfer, request.num_initial_tokens))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """The number of tokens after the cached ones: the rest of the prompt. None while its load is postponed.

        A producer always computes the whole prompt, so no lookup is needed. Blocks are reserved before the producer has
        computed any. If the producer is lost or never had the request, the load fails.
        """
        if request.request_id in self._postponed:
            return None
        return request.num_initial_tokens - num_computed_tokens

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        first_row = (request.num_initial_tokens - num_external_tokens) // self._block_size
        needed = tuple([None if block_id == NULL_BLOCK_ID else block_id for block_id in block_ids])
        self._loading.add(request.request_id)
        self._loads.append(LoadBlocks(request.request_id, first_row * self._num_groups, needed))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Removes loads that arrived or failed; notes which ones are postponed."""
        postponed = {load.request_id for load in output.failed_recving if load.is_postponed}
        self._postponed |= postponed & self._loading
        self._postponed.difference_update(output.can_load)
        self._loading.difference_update(load.request_id for load in output.finished_recving)
        self._loading.difference_update(load.request_id for load in output.failed_recving)

    def request_finished(self, request: Request) -> bool:
        """True if the blocks must stay allocated until no transfer writes to them."""
        is_loading = request.request_id in self._loading
        self._loading.discard(request.request_id)
        self._postponed.discard(request.request_id)
        if request.may_load or is_loading:
            self._commands.append(AbortLoad(request.request_id, "the request ended on the decode worker"))
        return is_loading

    def build(self) -> tuple[list[ImmediateCommand], list[LoadBlocks]]:
        """Commands and loads since the last step."""
        commands, loads = self._commands, self._loads
        self._commands, self._loads = [], []
        return commands, loads
