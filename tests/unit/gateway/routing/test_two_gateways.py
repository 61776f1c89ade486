"""Two gateways before one decode worker: neither knows of the other, and neither starves."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest

from baton.worker import WorkerStatus
from gateway.routing.placement import NoRoom, Placement
from gateway.routing.router import Router
from tests.factories.routing import POLICIES, P, ask, router_of, status

TOTAL, NEED, HEARTBEAT = 46, 8, 50
"""Blocks of the worker and of a request, and turns between two words of the worker."""


@dataclass(slots=True)
class Decode:
    """A worker that serves requests in order of arrival, as many as its blocks or its slots hold."""

    num_slots: int = 0
    """0: blocks alone are a limit."""
    line: deque[tuple[str, Placement]] = field(default_factory=deque)
    running: list[tuple[int, str, Placement]] = field(default_factory=list)
    longest_line: int = 0
    num_begun: int = 0

    @property
    def free(self) -> int:
        return TOTAL if self.num_slots else TOTAL - NEED * len(self.running)

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.num_slots if self.num_slots else self.free >= NEED

    @property
    def status(self) -> WorkerStatus:
        said = status("d0", len(self.running), waiting=len(self.line), free=self.free, total=TOTAL)
        return replace(said, max_num_seqs=self.num_slots)

    def turn(self, now: int) -> list[tuple[str, Placement]]:
        """The gateway whose request ended."""
        ended = [(name, placement) for end, name, placement in self.running if end == now]
        self.running = [entry for entry in self.running if entry[0] != now]
        while self.line and self.has_room:
            self.num_begun += 1
            duration = 15 + 7 * self.num_begun % 11
            self.running.append((now + duration, *self.line.popleft()))
        self.longest_line = max(self.longest_line, len(self.line))
        return ended


def play(
    routers: dict[str, Router], num_turns: int, first: int = 0, num_slots: int = 0
) -> tuple[Counter[str], Decode]:
    """Both gateways have endless requests, the second one from turn `first` on. Returns how many requests of each were
    served."""
    worker, served = Decode(num_slots), Counter[str]()
    for now in range(num_turns):
        for name, placement in worker.turn(now):
            served[name] += 1
            routers[name].ended("d0", placement)
            routers[name].ended("p0", placement)
        for index, (name, router) in enumerate(routers.items()):
            if now % HEARTBEAT == index * 2:
                router.on_status(worker.status)
            if now >= first * index:
                _send_all(router, name, worker)
    return served, worker


def _send_all(router: Router, name: str, worker: Decode) -> None:
    while True:
        try:
            placement = router.route(ask(3 if worker.num_slots else NEED * 16 - 1))
        except NoRoom:
            return
        router.sent("p0", placement)
        router.sent("d0", placement)
        worker.line.append((name, placement))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_caller_is_served_too(policy: str) -> None:
    """The gateway that first learns of free room takes this room. This is always the gateway whose request ended."""
    routers = {name: router_of(policy, "disaggregated", P[0], status("d0", free=TOTAL)) for name in "ab"}
    served, worker = play(routers, 600, first=20)
    alone, _ = play({"a": router_of(policy, "disaggregated", P[0], status("d0", free=TOTAL))}, 600)
    assert min(served.values()) >= served.total() // 8, served
    assert served.total() >= alone.total() * 0.95, "the worker is no less busy"
    assert worker.longest_line <= 1, "each has at most one there beyond its room"


def test_a_second_gateway_gets_its_part_of_the_slots() -> None:
    """With one request at a time, it was served a hundredth of all requests."""
    d0 = Decode(num_slots=16).status
    routers = {name: router_of("kv_aware", "disaggregated", P[0], d0) for name in "ab"}
    served, worker = play(routers, 600, first=20, num_slots=16)
    assert min(served.values()) >= served.total() // 3, served
    assert worker.longest_line <= 16
