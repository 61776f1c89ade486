"""Timeouts of a loop that runs, is busy, or stands still, on virtual time."""

import asyncio

import pytest

from baton.system.awake_timer import AwakeTimer, awake_timeout
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

LIMIT_S = 5.0


async def wait_in_vain() -> float:
    """How long the timeout took."""
    began_at = virtual_loop().time()
    with pytest.raises(TimeoutError):
        async with awake_timeout(LIMIT_S):
            await asyncio.Event().wait()
    return virtual_loop().time() - began_at


async def be_busy(turn_s: float) -> None:
    """Runs callbacks that take this long, one after another."""
    while True:
        virtual_loop().stand_still(turn_s)
        await asyncio.sleep(0)


@in_virtual_time
async def test_a_loop_that_runs_times_out_when_it_should() -> None:
    assert await wait_in_vain() == pytest.approx(LIMIT_S)


@pytest.mark.parametrize("turn_s", [0.01, 0.1, 0.3])
@in_virtual_time
async def test_a_busy_loop_does_so_as_well_within_its_turns(turn_s: float) -> None:
    busy = asyncio.create_task(be_busy(turn_s))
    assert LIMIT_S <= await wait_in_vain() <= LIMIT_S + 4 * turn_s
    busy.cancel()


@in_virtual_time
async def test_a_loop_that_hardly_runs_times_out_in_the_end() -> None:
    busy = asyncio.create_task(be_busy(10.0))
    assert await wait_in_vain() <= 120.0
    busy.cancel()


@in_virtual_time
async def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    loop = virtual_loop()
    loop.call_later(2.0, loop.stand_still, 60.0)
    took_s = await wait_in_vain()
    assert 60.0 + 0.75 * LIMIT_S <= took_s <= 60.0 + LIMIT_S


@in_virtual_time
async def test_what_came_while_the_loop_stood_still_is_taken() -> None:
    loop = virtual_loop()
    answer: asyncio.Future[str] = loop.create_future()
    loop.call_later(2.0, loop.stand_still, 60.0)
    loop.call_at(62.5, answer.set_result, "there")  # it takes a moment to be read
    async with awake_timeout(LIMIT_S):
        assert await answer == "there"


@in_virtual_time
async def test_what_does_not_come_after_a_standstill_is_missed_soon() -> None:
    loop = virtual_loop()
    loop.call_later(LIMIT_S - 0.5, loop.stand_still, 60.0)
    assert await wait_in_vain() <= 60.0 + LIMIT_S


@in_virtual_time
async def test_what_is_left_can_be_used_again() -> None:
    async with awake_timeout(LIMIT_S) as timer:
        await asyncio.sleep(1.0)
    assert timer.remaining_s == pytest.approx(LIMIT_S - 1.0)
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.0):
            await asyncio.Event().wait()


@in_virtual_time
async def test_an_error_of_the_block_and_a_cancellation_pass() -> None:
    with pytest.raises(KeyError):
        async with awake_timeout(LIMIT_S):
            raise KeyError
    waiting = asyncio.create_task(wait_in_vain())
    await asyncio.sleep(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@in_virtual_time
async def test_a_timer_calls_once_unless_it_was_cancelled() -> None:
    called: list[str] = []
    AwakeTimer(1.0, lambda: called.append("first"))
    second = AwakeTimer(2.0, lambda: called.append("second"))
    await asyncio.sleep(1.5)
    second.cancel()
    second.cancel()
    await asyncio.sleep(5.0)
    assert called == ["first"]
