"""NextIncarnation: places and starts the next incarnation of one replica, also while the present one serves.

An incarnation serves only after the caller has taken it. NextIncarnation does not watch processes, and knows no delays
after a death.
"""

from collections.abc import Callable, Collection

from baton.errors import BatonError, ClusterError, FleetError
from baton.system.awake_timer import awake_timeout
from baton.worker import WorkerEndpoint
from cluster.controller.launcher import Found, Incarnation, Launcher, NodeDrains, OnStartProgress
from cluster.controller.replica import Replica


class NextIncarnation:
    """`place` and `start` begin an incarnation at once. `prepare` begins one beside the present one, and
    `take_prepared` returns it.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        replica: Replica,
        launcher: Launcher,
        start_timeout_s: float,
        on_incarnation: Callable[[str], int],
        on_progress: OnStartProgress,
    ) -> None:
        """`on_incarnation` records that another incarnation of this worker begins, and returns its number."""
        self._replica = replica
        self._launcher = launcher
        self._start_timeout_s = start_timeout_s
        self._on_incarnation = on_incarnation
        self._on_progress = on_progress
        self._avoided: Collection[str] = ()
        """Nodes from which this worker moves away."""
        self._prepared: Incarnation | None = None
        """The incarnation of `prepare`, from its placement until it is taken or has ended."""
        self._ready: Found | None = None
        """`_prepared`, once it is able to serve."""

    async def place(self) -> Incarnation:
        """See Launcher.place."""
        number = self._on_incarnation(self._replica.name)
        return await self._launcher.place(self._replica.name, self._replica.role, number)

    async def start(self, incarnation: Incarnation) -> WorkerEndpoint:
        """Returns the endpoint of the started worker.

        Raises the worker's error, ClusterError if it is late, and NodeDrains if it must not serve on its node.
        """
        try:
            endpoint = await self._load(incarnation)
        except BatonError:
            self._check_node(incarnation)  # the worker may have been ended because its node drains
            raise
        self._check_node(incarnation)
        return endpoint

    async def prepare(self) -> None:
        """Returns once `take_prepared` has an incarnation. Raises FleetError, with the reason, if it fails.

        A cancelled call leaves nothing behind.
        """
        try:
            while self._ready is None:
                try:
                    async with awake_timeout(self._start_timeout_s):
                        self._prepared = await self.place()
                    self._ready = Found(self._prepared, await self.start(self._prepared))
                except NodeDrains:
                    await self.discard()
        except (TimeoutError, BatonError) as error:
            reason = str(error) or "no room became free"
            raise FleetError(f"no new incarnation of worker {self._replica.name}: {reason}") from None
        finally:
            if self._ready is None:
                await self.discard()

    def take_prepared(self) -> Found | None:
        """The prepared incarnation, which now belongs to the caller; None if there is none."""
        ready, self._ready = self._ready, None
        if ready is not None:
            self._prepared = None
        return ready

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether a prepared incarnation is on one of these nodes."""
        return self._prepared is not None and self._prepared.node in nodes

    def avoid(self, nodes: Collection[str]) -> None:
        """From now on, an incarnation that starts on one of these nodes gives way to another one."""
        self._avoided = nodes

    async def discard(self) -> None:
        """Ends the prepared incarnation if it was not taken."""
        self._ready = None
        if self._prepared is not None:
            await self._prepared.stop(0.0)
            self._prepared = None

    async def _load(self, incarnation: Incarnation) -> WorkerEndpoint:
        timeout_s = self._start_timeout_s
        try:
            async with awake_timeout(timeout_s):
                return await incarnation.start(self._on_progress)
        except TimeoutError:
            raise ClusterError(f"it was not ready within {timeout_s:g} s (cluster.start_timeout_s)") from None

    def _check_node(self, incarnation: Incarnation) -> None:
        if incarnation.node in self._avoided:
            raise NodeDrains(
                f"its node {incarnation.node} began to drain while the worker started there"
            ) from None
