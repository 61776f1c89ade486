"""Router: which workers a request goes to, from loads alone; pure logic, so that a simulation can run it too."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Literal

from baton.errors import WorkerUnavailable


class Mode(Enum):
    """Where a prompt is computed: by a prefill worker, or by the decode worker itself."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes requests, and how many it has from all gateways as far as we know."""

    name: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Who does what. `prefill` is None in local mode; `is_fallback`: disaggregation was wanted, but not to be had."""

    mode: Mode
    prefill: str | None
    decode: str
    is_fallback: bool = False


class Router:
    """Chooses pairs. `default_mode` applies to requests that do not ask for one."""

    def __init__(self, policy: Literal["round_robin", "least_loaded"], default_mode: Mode) -> None:
        self._policy = policy
        self._default_mode = default_mode
        self._turn = count()

    def route(
        self,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        asked_mode: Mode | None = None,
        excluded: Collection[str] = (),
    ) -> Placement:
        """A placement without `excluded` workers, or WorkerUnavailable.

        A request that asks for disaggregation never runs locally; another may, when no prefill worker is left.
        """
        turn = next(self._turn)
        decoder = self._choose(decode, excluded, turn)
        if decoder is None:
            raise WorkerUnavailable("no decode worker is available")
        if (asked_mode or self._default_mode) is Mode.LOCAL:
            return Placement(Mode.LOCAL, None, decoder.name)
        prefiller = self._choose(prefill, excluded, turn)
        if prefiller is not None:
            return Placement(Mode.DISAGGREGATED, prefiller.name, decoder.name)
        if asked_mode is Mode.DISAGGREGATED:
            raise WorkerUnavailable("no prefill worker is available, and the request requires one")
        return Placement(Mode.LOCAL, None, decoder.name, is_fallback=True)

    def _choose(
        self, candidates: Sequence[Candidate], excluded: Collection[str], turn: int
    ) -> Candidate | None:
        able = sorted((c for c in candidates if c.name not in excluded), key=lambda c: c.name)
        if not able:
            return None
        rotated = able[turn % len(able) :] + able[: turn % len(able)]
        return rotated[0] if self._policy == "round_robin" else min(rotated, key=lambda c: c.num_requests)
