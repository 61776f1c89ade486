"""GrammarCheck with a scripted process: verdicts, what is remembered, and the order of callers."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.errors import DeadlinePassed, InvalidRequest, Overloaded
from baton.messages.grammar_check import GrammarEndedProcess, GrammarTried, Message, TryGrammar
from baton.sampling import GrammarKind, StructuredOutput
from gateway.grammars import check as module
from gateway.grammars.check import GrammarCheck
from gateway.grammars.process import CompileProcess


class ScriptedProcess(CompileProcess):
    """Answers at once, by what a text begins with; a text may take virtual time."""

    def __init__(
        self, on_message: Callable[[Message], None], on_end: Callable[[], None], world: "World"
    ) -> None:
        super().__init__([], on_message, on_end)
        self._world = world
        self.runs = False

    async def start(self) -> None:
        self._world.num_started += 1
        if self._world.cannot_start:
            raise OSError("no memory")
        self.runs = True

    @property
    def is_running(self) -> bool:
        return self.runs

    async def send(self, message: TryGrammar) -> None:
        source, number = message.output.source, message.number
        self._world.tried.append(source)
        if source.startswith("slow"):
            self._world.clock.advance(1.0)
        if source.startswith("waits"):
            await self._world.may_answer.wait()
        if source.startswith("bad"):
            self._on_message(GrammarTried(number, "unclosed group"))
        elif source.startswith("kills"):
            self._on_message(GrammarEndedProcess(number, signal.SIGSEGV))
        elif source.startswith("endless"):
            self._on_message(GrammarEndedProcess(number, signal.SIGPROF))
        elif source.startswith("unlucky"):
            self._on_message(GrammarEndedProcess(number, signal.SIGKILL))
        elif source.startswith("exits"):
            self._on_message(GrammarEndedProcess(number, 0))
        elif source.startswith("ends all"):
            self.end()
        elif not source.startswith("silent"):
            self._on_message(GrammarTried(number, None))
        if source.startswith("later"):
            self._on_message(GrammarEndedProcess(number, signal.SIGABRT))

    def kill(self) -> None:
        self._world.num_killed += 1
        self.end()

    async def stop(self) -> None:
        self.end()

    def end(self) -> None:
        if self.runs:
            self.runs = False
            self._on_end()


class World:
    def __init__(self, max_waiting: int) -> None:
        self.clock = VirtualClock()
        self.tried: list[str] = []
        self.verdicts: list[str] = []
        self.num_started = self.num_killed = 0
        self.cannot_start = False
        self.may_answer = asyncio.Event()
        self.grammars = GrammarCheck(
            lambda on_message, on_end: ScriptedProcess(on_message, on_end, self),
            self.clock,
            max_waiting,
            self.verdicts.append,
        )

    async def check(self, source: str, caller: str = "alice", deadline: float | None = None) -> str:
        """`ok`, or what was raised."""
        try:
            await self.grammars.check(StructuredOutput(GrammarKind.REGEX, source), caller, deadline)
        except (InvalidRequest, Overloaded, DeadlinePassed) as error:
            return str(error)
        return "ok"


def play(scene: Callable[[World], Coroutine[Any, Any, None]], max_waiting: int = 64) -> World:
    async def run() -> World:
        world = World(max_waiting)
        await scene(world)
        await world.grammars.stop()
        return world

    return asyncio.run(run())


def test_c13_each_text_is_tried_once_whatever_its_verdict() -> None:
    async def scene(world: World) -> None:
        for _ in range(2):
            assert await world.check("good") == "ok"
            assert await world.check("bad (") == "structured_output: unclosed group"

    world = play(scene)
    assert world.tried == ["good", "bad ("]
    assert world.verdicts == ["compiled", "invalid", "known", "known"]
    assert world.num_started == 1


def test_a_text_that_ended_the_process_is_refused_from_then_on_and_others_are_served() -> None:
    async def scene(world: World) -> None:
        for _ in range(3):
            assert "takes more than 32 MiB of stack or 512 MiB of memory" in await world.check("kills")
            assert "compiling it takes more than 1 s" in await world.check("endless")
            assert await world.check("good") == "ok"

    world = play(scene)
    assert world.tried == ["kills", "endless", "good"]
    assert world.verdicts[:3] == ["killed", "killed", "compiled"]


def test_a_text_that_ends_the_process_after_it_compiled_is_refused_the_next_time() -> None:
    async def scene(world: World) -> None:
        assert await world.check("later") == "ok"
        assert "too complex" in await world.check("later")

    assert play(scene).verdicts == ["compiled", "killed", "known"]


def test_a_process_that_ends_as_a_whole_is_nobodys_fault_and_replaced() -> None:
    async def scene(world: World) -> None:
        assert "ended; try again" in await world.check("ends all")
        assert await world.check("good") == "ok"

    assert play(scene).num_started == 2


def test_where_no_process_can_be_started_grammars_are_refused_for_now() -> None:
    async def scene(world: World) -> None:
        world.cannot_start = True
        await world.grammars.warm_up()
        assert await world.check("good") == "grammars cannot be compiled at present"
        world.cannot_start = False
        assert await world.check("good") == "ok"

    assert play(scene).num_started == 3


def test_a_process_that_says_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRY_TIMEOUT_S", 0.01)

    async def scene(world: World) -> None:
        assert "could not be compiled within" in await world.check("silent")
        assert await world.check("good") == "ok"

    world = play(scene)
    assert (world.num_killed, world.num_started) == (1, 2)


@pytest.mark.in_order
def test_c57_a_burst_of_dear_grammars_makes_another_caller_wait_for_one_of_them() -> None:
    async def scene(world: World) -> None:
        held = asyncio.create_task(world.check("waits", "mallory"))
        while "waits" not in world.tried:
            await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(world.check(f"slow {number}", "mallory"))
            await asyncio.sleep(0)
            for number in range(3):
                group.create_task(world.check(f"good {number}", "alice"))
            await asyncio.sleep(0)
            world.may_answer.set()
        await held

    slow = [f"slow {number}" for number in range(5)]
    assert play(scene).tried == ["waits", slow[0], "good 0", "good 1", "good 2", *slow[1:]]


def test_a_process_that_is_killed_from_outside_condemns_no_text() -> None:
    async def scene(world: World) -> None:
        assert "was killed; try again" in await world.check("unlucky")
        assert "was killed; try again" in await world.check("unlucky")

    world = play(scene)
    assert world.tried == ["unlucky", "unlucky"]
    assert world.verdicts == []


def test_a_text_whose_compiler_exits_is_refused_from_then_on() -> None:
    async def scene(world: World) -> None:
        assert "too complex" in await world.check("exits")

    assert play(scene).verdicts == ["killed"]


def test_c57_where_there_is_no_room_the_caller_with_most_of_them_waiting_is_refused() -> None:
    async def scene(world: World) -> None:
        held = asyncio.create_task(world.check("waits", "mallory"))
        while "waits" not in world.tried:
            await asyncio.sleep(0)
        mallory = [asyncio.create_task(world.check(f"m{number}", "mallory")) for number in range(3)]
        await asyncio.sleep(0)
        alice = asyncio.create_task(world.check("a", "alice"))
        await asyncio.sleep(0)
        world.may_answer.set()
        assert await alice == await held == "ok"
        assert [await each for each in mallory] == [
            "ok",
            "ok",
            "3 grammars are waiting to be compiled, which is the limit",
        ]

    play(scene, max_waiting=3)


def test_a_client_waits_no_longer_than_its_deadline_and_one_that_left_is_not_served() -> None:
    async def scene(world: World) -> None:
        held = asyncio.create_task(world.check("waits"))
        while "waits" not in world.tried:
            await asyncio.sleep(0)
        soon = asyncio.get_running_loop().time() + 0.01
        assert "deadline passed" in await world.check("late", deadline=soon)
        left = asyncio.create_task(world.check("left"))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        world.may_answer.set()
        assert await held == "ok"

    assert play(scene).tried == ["waits"]


def test_two_clients_with_the_same_new_text_cost_one_compilation() -> None:
    async def scene(world: World) -> None:
        assert await asyncio.gather(*[world.check("good") for _ in range(5)]) == ["ok"] * 5

    assert play(scene).tried == ["good"]


def test_the_latest_verdicts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VERDICT_BYTES", 2 * module.VERDICT_OVERHEAD_BYTES)

    async def scene(world: World) -> None:
        for source in ("a", "b", "a", "c", "a", "b"):
            assert await world.check(source) == "ok"

    assert play(scene).tried == ["a", "b", "c", "b"]


def test_waiting_grammars_are_refused_when_the_gateway_stops() -> None:
    async def scene(world: World) -> None:
        held = asyncio.create_task(world.check("waits"))
        while "waits" not in world.tried:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(world.check("good"))
        await asyncio.sleep(0)
        await world.grammars.stop()
        assert "this gateway is stopping" in await waiting
        assert "stopping" in await world.check("another")
        held.cancel()

    play(scene)
