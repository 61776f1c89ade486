"""An interrupt is never lost, whenever it comes."""

import asyncio
import os
import signal

import pytest

from baton.system.signals import StopSignals, either, unless


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_there_is_a_loop_a_signal_is_a_keyboard_interrupt(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signal.raise_signal(number)
    assert signals.stop.is_set()
    assert signal.getsignal(number) is former


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_loop_a_signal_does_not_end_what_cleans_up(number: signal.Signals) -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    with StopSignals() as signals:
        signals.run(work())
        signal.raise_signal(number)
        assert signals.stop.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
