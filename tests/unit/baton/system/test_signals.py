"""An interrupt is never lost, whenever it comes."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from baton.system.signals import StopSignals, either, unless

PROGRAM = """
import asyncio, os, signal, sys
from baton.system.signals import StopSignals

async def work(signals):
    print("ready", flush=True)
    while os.isatty(0) and not signals.stop.is_set():
        await asyncio.sleep(0.01)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        os.write(int(sys.argv[1]), b"runs")
        return await asyncio.Event().wait()
    await signals.stop.wait()
    signal.raise_signal(signal.SIGHUP)
    await asyncio.sleep(0)
    print("to a terminal that is closed", flush=True)
    os.write(int(sys.argv[1]), b"hurries" if signals.hurry.is_set() else b"stopped, end")

with StopSignals() as signals:
    signals.run(work(signals))
"""


def test_an_interrupt_that_a_destructor_swallowed_stops_what_begins_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InterruptedAtItsEnd:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", lambda error: unraisable.append(error.exc_type))
    came_to_its_end = []

    async def work(signals: StopSignals) -> None:
        came_to_its_end.append(await unless(signals.stop, asyncio.Event().wait()))
        assert not signals.hurry.is_set()

    with StopSignals() as signals:
        InterruptedAtItsEnd()
        assert unraisable == [KeyboardInterrupt], "Python itself went on"
        signals.run(work(signals))
    assert came_to_its_end == [False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_there_is_a_loop_a_signal_is_a_keyboard_interrupt(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signal.raise_signal(number)
    assert signals.stop.is_set()
    assert signal.getsignal(number) is former


def test_a_second_hang_up_does_not_interrupt_the_cleanup() -> None:
    with StopSignals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_loop_the_first_signal_stops_and_the_second_hurries(number: signal.Signals) -> None:
    seen = []

    async def work(signals: StopSignals) -> None:
        for event in (signals.stop, signals.hurry):
            os.kill(os.getpid(), number)
            await event.wait()
            seen.append((signals.stop.is_set(), signals.hurry.is_set()))

    with StopSignals() as signals:
        signals.run(work(signals))
    assert seen == [(True, False), (True, True)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_the_loop_a_signal_does_not_end_what_cleans_up(number: signal.Signals) -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    with StopSignals() as signals:
        signals.run(work())
        signal.raise_signal(number)
        assert signals.stop.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_as_the_loop_is_being_made_stops_its_work(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    make_loop = asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        signal.raise_signal(number)
        return make_loop()

    monkeypatch.setattr("asyncio.events.new_event_loop", interrupted)
    came_to_its_end = []

    async def work(signals: StopSignals) -> None:
        came_to_its_end.append(await unless(signals.stop, asyncio.Event().wait()))

    with StopSignals() as signals:
        signals.run(work(signals))
    assert came_to_its_end == [False]


def run_until_its_terminal_is_closed(*prefix: str) -> tuple[int | None, bytes]:
    """Runs PROGRAM in a session of its own, whose terminal is closed as soon as it is ready. Returns its exit
    code, None if it still runs, and what it reported."""
    terminal, its_terminal = pty.openpty()
    report, its_report = os.pipe()
    program = subprocess.Popen(
        (*prefix, "setsid", "--ctty", sys.executable, "-c", PROGRAM, str(its_report)),
        stdin=its_terminal,
        stdout=its_terminal,
        stderr=its_terminal,
        pass_fds=[its_report],
    )
    os.close(its_terminal)
    os.close(its_report)
    try:
        with open(terminal, "rb", buffering=0) as its_output:
            assert its_output.readline() == b"ready\r\n"
        lines = os.read(report, 100)
        with suppress(subprocess.TimeoutExpired):
            program.wait(60.0 if lines.endswith(b"end") else 0.0)
        return program.returncode, lines
    finally:
        program.kill()
        program.wait()
        os.close(report)


def test_a_closed_terminal_asks_to_stop_once() -> None:
    assert run_until_its_terminal_is_closed() == (0, b"stopped, end")


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    assert run_until_its_terminal_is_closed("sh", "-c", 'trap "" HUP; exec "$0" "$@"') == (None, b"runs")


async def test_the_first_of_several_works_ends_the_others() -> None:
    ended = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("for ever")

    async def fail() -> None:
        raise ValueError("too late")

    await either(for_ever(), asyncio.sleep(0.01))
    assert ended == ["for ever"]
    with pytest.raises(ValueError, match="too late"):
        await either(fail(), for_ever())
