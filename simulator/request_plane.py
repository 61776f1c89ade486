"""RequestPlane: messages between gateway and workers, in order and reliable, except that the connection can be cut."""

from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.world import World

MAX_DELAY_S = 0.002


@dataclass(slots=True)
class RequestPlane:
    """Ends are names; `cut_off` holds those that nothing gets to, nor comes from."""

    world: World
    cut_off: set[str] = field(default_factory=set)
    _last_arrival: dict[tuple[str, str], float] = field(default_factory=dict)

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Lost if the two are cut off from each other when it is sent, or when it would arrive."""
        if self._is_cut(source, target):
            return
        when = self.world.now + self.world.between(0.0001, MAX_DELAY_S)
        when = self._last_arrival[source, target] = max(when, self._last_arrival.get((source, target), 0.0))
        self.world.at(when, lambda: None if self._is_cut(source, target) else arrive())

    def _is_cut(self, source: str, target: str) -> bool:
        is_cut = source in self.cut_off or target in self.cut_off
        self.world.counts["fault request plane cut"] += is_cut
        return is_cut
