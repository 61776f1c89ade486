"""Stores the steps of rollouts, so that a caller may request the same step again."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

from baton.errors import FleetError
from baton.fleet import RolloutStep
from baton.messages.control import RolloutBegun, RolloutProgress

_NUM_ENDED = 8
"""How many ended rollouts are kept, for callers that still request the last steps."""


class Rollouts:
    """Begins rollouts and returns their steps; a caller may ask for the same step more than once."""

    def __init__(self, begin: Callable[[tuple[str, ...]], AsyncIterator[RolloutStep]]) -> None:
        self._begin = begin
        self._rollouts: dict[str, _Rollout] = {}

    async def begin_rollout(self, workers: tuple[str, ...]) -> RolloutBegun:
        """Begins a rollout. The rollout continues even if its caller disconnects."""
        rollout_id = secrets.token_hex(4)
        ended = [known for known, rollout in self._rollouts.items() if rollout.is_over]
        for known in ended[:-_NUM_ENDED]:
            del self._rollouts[known]
        self._rollouts[rollout_id] = _Rollout(self._begin(workers))
        return RolloutBegun(rollout_id)

    async def wait_step(self, rollout_id: str, index: int) -> RolloutProgress:
        """The step of this number once it is done; None after the last. Raises the error that ended the rollout."""
        if (rollout := self._rollouts.get(rollout_id)) is None:
            raise FleetError("the controller restarted, which ended the rollout; start the rollout again")
        return RolloutProgress(await rollout.step(index))

    async def stop(self) -> None:
        """Ends all running rollouts."""
        await asyncio.gather(*[rollout.stop() for rollout in self._rollouts.values()])


class _Rollout:
    """A rollout and its finished steps."""

    def __init__(self, steps: AsyncIterator[RolloutStep]) -> None:
        self._steps: list[RolloutStep] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(steps))

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def step(self, index: int) -> RolloutStep | None:
        while index >= len(self._steps):
            if self._task.done():
                self._task.result()  # raises the rollout's error
                return None
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return self._steps[index]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, steps: AsyncIterator[RolloutStep]) -> None:
        async for step in steps:
            self._steps.append(step)
            self._changed.set()
