"""Commands for the engine's thread that are waited for: each has one outcome, whatever becomes of the thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count

import pytest

from baton.errors import FleetError
from worker.commands import CommandQueue


class Engine:
    """A thread that runs commands until one fails with an error that it does not expect."""

    def __init__(self) -> None:
        self.commands, self.ended = CommandQueue(), Future[None]()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def ask(self, command: Callable[[], int], timeout_s: float = 60.0) -> int:
        return self.commands.ask(command, timeout_s, self.ended)

    def stop(self) -> None:
        self.commands.put(self._end)
        self._thread.join()

    def _end(self) -> None:
        raise SystemExit

    def _run(self) -> None:
        try:
            while True:
                self.commands.get()()
        except BaseException as error:
            self.failure = error
        finally:
            self.ended.set_result(None)


def raise_(error: BaseException) -> int:
    raise error


def test_the_result_and_the_refusal_of_a_command_come_back() -> None:
    engine = Engine()
    engine.start()
    assert engine.ask(lambda: 7) == 7
    with pytest.raises(FleetError, match="blocks are in use"):
        engine.ask(lambda: raise_(FleetError("blocks are in use")))
    assert engine.ask(lambda: 8) == 8, "a refusal ends nothing"
    engine.stop()


def test_a_command_that_was_given_up_is_not_run_later() -> None:
    engine, runs = Engine(), count(1)
    with pytest.raises(FleetError, match="its engine was busy with one step"):
        engine.ask(lambda: next(runs), timeout_s=0.01)
    engine.start()
    assert engine.ask(lambda: next(runs)) == 1
    engine.stop()


def test_an_engine_that_has_ended_runs_nothing() -> None:
    engine = Engine()
    engine.start()
    engine.stop()
    with pytest.raises(FleetError, match="its engine has ended"):
        engine.ask(lambda: 7)


def test_a_command_that_ends_the_engine_does_not_leave_its_caller_waiting() -> None:
    engine = Engine()
    engine.start()
    with pytest.raises(FleetError, match="its engine failed: no device"):
        engine.ask(lambda: raise_(RuntimeError("no device")))
    engine.ended.result(60.0)
    assert str(engine.failure) == "no device"
