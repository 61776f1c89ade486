"""ConnectorWorker: the half of the KV connector that moves bytes; an engine calls it around each step."""

from collections.abc import Set
from typing import Any, Protocol

from baton.step import KVConnectorOutput
from baton.worker import KVPeerCounts


class ConnectorWorker(Protocol):
    """The half of the KV connector that moves bytes. No call raises because of a peer."""

    def get_finished(self) -> KVConnectorOutput: ...

    def send_commands(self, metadata: Any) -> None:
        """Called as soon as a step is planned: announces, hands over, or gives up blocks.

        Returns once no transfer reads the blocks that were given up.
        """
        ...

    def start_load_kv(self, metadata: Any) -> None:
        """Called when all steps before the planned step are computed, so none writes the blocks to load."""
        ...

    def save_kv_blocks(self, metadata: Any, lost: Set[str]) -> None:
        """Called when the step is computed.

        The blocks that it filled may be sent, except those of `lost` requests.
        """
        ...

    def counters(self) -> dict[str, int]: ...

    def peers(self) -> tuple[KVPeerCounts, ...]: ...

    def shutdown(self) -> None:
        """Ends all hand-overs, so that peers soon consider them lost. May be called more than once."""
        ...
