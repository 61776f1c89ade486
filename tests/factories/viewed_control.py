"""A controller that is only asked for views of its fleet."""

import asyncio
from typing import Any, TypeVar

from baton.errors import ClusterError
from baton.fleet import FleetView
from baton.messages.control import ControlRequest, WaitView

R = TypeVar("R")


class ViewedControl:
    """Answers each question with the next of `answers`: returns a view, raises an error. Waits while none is left."""

    def __init__(self, *answers: FleetView | ClusterError) -> None:
        self.answers: asyncio.Queue[FleetView | ClusterError] = asyncio.Queue()
        for answer in answers:
            self.answers.put_nowait(answer)
        self.asked: list[tuple[str, int]] = []
        """The incarnation and version of each question."""
        self.is_over = asyncio.Event()
        """Set once a question found no answer."""

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        assert isinstance(request, WaitView)
        assert request.wait_s > 0
        self.asked.append((request.controller_incarnation, request.version))
        if self.answers.empty():
            self.is_over.set()
        answer = await self.answers.get()
        if isinstance(answer, ClusterError):
            raise answer
        return answer
