"""ConnectorWorker: the half of the KV connector that moves bytes, as an engine calls it around each step."""

from collections.abc import Set
from typing import Any, Protocol

from baton.step import KVConnectorOutput
from baton.worker import KVPeerCounts


class ConnectorWorker(Protocol):
    """The half of the KV connector that moves bytes. No peer can make a call raise."""

    def get_finished(self) -> KVConnectorOutput: ...

    def send_commands(self, metadata: Any) -> None:
        """As soon as a step is planned: what to announce, to hand over, to give up. Returns when blocks that were taken
        back are not read any more."""
        ...

    def start_load_kv(self, metadata: Any) -> None:
        """When every step before the planned one is computed: nothing writes the blocks that are to be loaded."""
        ...

    def save_kv_blocks(self, metadata: Any, lost: Set[str]) -> None:
        """When the step is computed: the blocks it filled may leave, but not those of `lost` requests."""
        ...

    def counters(self) -> dict[str, int]: ...

    def peers(self) -> tuple[KVPeerCounts, ...]: ...

    def shutdown(self) -> None:
        """Ends every hand-over, so that peers take them for lost soon; may be repeated."""
        ...
