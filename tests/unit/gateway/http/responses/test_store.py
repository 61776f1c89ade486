"""What is kept is bounded, per caller and together, and is its caller's alone. The tests use a real Redis if the
machine has one."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.errors import StoreUnavailable
from gateway.http.responses import redis_store, store
from gateway.http.responses.redis_store import RedisStore
from gateway.http.responses.store import (
    OVERHEAD_BYTES,
    MemoryStore,
    ResponseStore,
    StoreBounds,
    StoredResponse,
)
from tests.factories.redis_server import RedisServer, redis_server

Advance = Callable[[float], None]
SIZE = OVERHEAD_BYTES + 100
ROOM = StoreBounds(caller_bytes=3 * SIZE, ttl_s=100.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def stored(name: str) -> StoredResponse:
    return StoredResponse(f"response {name}".encode().ljust(50), f"context {name}".encode().ljust(50))


@asynccontextmanager
async def memory() -> AsyncIterator[tuple[ResponseStore, Advance]]:
    clock = VirtualClock()
    yield MemoryStore(ROOM, 8 * SIZE, clock), clock.advance


@asynccontextmanager
async def redis(server: RedisServer) -> AsyncIterator[tuple[ResponseStore, Advance]]:
    now = 1_000_000.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    one = RedisStore(server.url, ROOM, lambda: now)
    await one._redis.flushall()
    try:
        yield one, advance
    finally:
        await one.close()


async def keys_of(one: RedisStore) -> list[bytes]:
    keys: Any = await one._redis.keys("*")
    return list(keys)


Check = Callable[[ResponseStore, Advance], Awaitable[None]]


async def own_responses_alone(one: ResponseStore, advance: Advance) -> None:
    await one.check()
    await one.keep("alice", "resp_1", stored("1"))
    assert await one.response("alice", "resp_1") == stored("1").response
    assert await one.contexts("alice", ["resp_2", "resp_1"]) == [None, stored("1").context]
    for caller in ("bob", "", "alice:", "{alice}", "alic"):
        assert await one.response(caller, "resp_1") is None
        assert await one.contexts(caller, ["resp_1"]) == [None]
        assert not await one.delete(caller, "resp_1")
    assert await one.delete("alice", "resp_1")
    assert not await one.delete("alice", "resp_1")
    assert await one.response("alice", "resp_1") is None
    assert await one.contexts("alice", []) == []


async def the_least_recently_used_makes_room(one: ResponseStore, advance: Advance) -> None:
    for name in ("1", "2", "3"):
        await one.keep("alice", name, stored(name))
        advance(1.0)
    await one.contexts("alice", ["1"])
    await one.keep("alice", "4", stored("4"))
    kept = [name for name in ("1", "2", "3", "4") if await one.response("alice", name)]
    assert kept == ["1", "3", "4"]


async def one_that_is_too_large_is_not_kept(one: ResponseStore, advance: Advance) -> None:
    await one.keep("alice", "1", stored("1"))
    await one.keep("alice", "big", StoredResponse(b"x" * 3 * SIZE, b""))
    assert await one.response("alice", "big") is None
    assert await one.response("alice", "1") is not None


async def the_same_id_again_is_the_later_one(one: ResponseStore, advance: Advance) -> None:
    for _ in range(5):
        await one.keep("alice", "1", stored("1"))
    await one.keep("alice", "1", stored("2"))
    await one.keep("alice", "3", stored("3"))
    assert await one.response("alice", "1") == stored("2").response


async def no_more_than_so_many(one: ResponseStore, advance: Advance) -> None:
    for name in range(6):
        await one.keep("alice", f"{name}", StoredResponse(b"", b""))
        advance(1.0)
    assert [name for name in range(6) if await one.response("alice", f"{name}") is not None] == [4, 5]


CHECKS = [
    own_responses_alone,
    the_least_recently_used_makes_room,
    one_that_is_too_large_is_not_kept,
    the_same_id_again_is_the_later_one,
]


@pytest.mark.parametrize("check", CHECKS)
async def test_in_memory(check: Check) -> None:
    async with memory() as (one, advance):
        await check(one, advance)


@pytest.mark.parametrize("check", CHECKS)
async def test_in_redis(check: Check, server: RedisServer) -> None:
    async with redis(server) as (one, advance):
        await check(one, advance)


async def test_their_number_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 2)
    async with memory() as (one, advance):
        await no_more_than_so_many(one, advance)


async def test_their_number_is_bounded_in_redis(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "MAX_RESPONSES", 2)
    async with redis(server) as (one, advance):
        await no_more_than_so_many(one, advance)
        assert isinstance(one, RedisStore)
        names = [key.rpartition(b":")[2] for key in await keys_of(one)]
        assert sorted(names) == [b"4", b"5", b"sizes", b"used"], "nothing is left of what was dropped"


async def test_redis_sums_the_bytes_of_a_caller(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So storing a response does not read the sizes of all others."""
    monkeypatch.setattr(redis_store, "MAX_RESPONSES", 4)
    chance = random.Random(1)
    async with redis(server) as (one, advance):
        assert isinstance(one, RedisStore)
        for _ in range(200):
            advance(chance.choice([0.0, 1.0, 40.0]))
            assert not await one.delete("alice", "total"), "the sum cannot be deleted by any name"
            response_id = f"resp_{chance.randrange(6)}"
            if chance.random() < 0.7:
                await one.keep("alice", response_id, stored("x" * chance.randrange(3 * SIZE)))
            else:
                await one.delete("alice", response_id)
            if not (keys := [key for key in await keys_of(one) if key.endswith(b":sizes")]):
                continue
            sizes = {name: int(size) for name, size in (await one._redis.hgetall(keys[0])).items()}
            assert sizes.pop(redis_store.TOTAL.encode()) == sum(sizes.values()) <= ROOM.caller_bytes
            assert len(sizes) <= 4


@pytest.mark.parametrize("index", ["used", "sizes"])
async def test_a_full_redis_may_evict_an_index(server: RedisServer, index: str) -> None:
    """The caller can still keep as much as before, also when it has to lose older responses."""
    async with redis(server) as (one, advance):
        assert isinstance(one, RedisStore)
        for name in ("1", "2", "3"):
            await one.keep("alice", name, stored(name))
        await one._redis.delete(*[key for key in await keys_of(one) if key.endswith(f":{index}".encode())])
        for name in ("4", "5", "6", "7"):
            await one.keep("alice", name, stored(name))
            advance(1.0)
        kept = [name for name in ("4", "5", "6", "7") if await one.response("alice", name)]
        assert kept == ["5", "6", "7"]


async def test_memory_forgets_with_time_since_the_last_use() -> None:
    async with memory() as (one, advance):
        await one.keep("alice", "1", stored("1"))
        await one.keep("bob", "2", stored("2"))
        advance(60.0)
        await one.contexts("alice", ["1"])
        advance(60.0)
        assert await one.response("alice", "1") is not None
        assert await one.response("bob", "2") is None
        assert isinstance(one, MemoryStore)
        assert one.num_bytes == SIZE
        advance(100.0)
        assert await one.response("alice", "1") is None
        assert one.num_bytes == 0


async def test_redis_forgets_by_itself(server: RedisServer) -> None:
    async with redis(server) as (one, _):
        await one.keep("alice", "1", stored("1"))
        assert isinstance(one, RedisStore)
        for key in await keys_of(one):
            assert 0 < await one._redis.pttl(key) <= 100_000


async def test_who_has_most_makes_room_for_others() -> None:
    one = MemoryStore(StoreBounds(6 * SIZE, 100.0), 8 * SIZE, VirtualClock())
    for number in range(6):
        await one.keep("greedy", f"{number}", stored("x"))
    for caller in ("alice", "bob", "carol"):
        await one.keep(caller, "1", stored("x"))
    assert one.num_bytes == 8 * SIZE
    assert [await one.response(caller, "1") is not None for caller in ("alice", "bob", "carol")] == [True] * 3
    assert await one.response("greedy", "0") is None
    assert await one.response("greedy", "1") is not None


async def test_a_redis_that_is_gone_is_an_error_and_no_absence() -> None:
    with redis_server() as server:
        one = RedisStore(server.url, ROOM)
        await one.keep("alice", "1", stored("1"))
        server.stop()
        for call in (
            one.check(),
            one.response("alice", "1"),
            one.contexts("alice", ["1"]),
            one.keep("alice", "2", stored("2")),
            one.delete("alice", "1"),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                await call
            assert str(server.port) not in str(caught.value)
        await one.close()


async def test_a_redis_that_never_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "REDIS_TIMEOUT_S", 0.05)
    connections = []
    async with await asyncio.start_server(
        lambda *streams: connections.append(streams), "127.0.0.1", 0
    ) as silent:
        one = RedisStore(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0", ROOM)
        with pytest.raises(StoreUnavailable):
            await one.check()
        await one.close()
        assert len(connections) == 1
        connections[0][1].close()


async def test_kept_connections_that_have_died_silently_cost_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A firewall may have forgotten the connections. Here, the first two connections answer one PING each."""
    monkeypatch.setattr(redis_store, "REDIS_TIMEOUT_S", 0.3)
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        is_mute, may_die = False, len(writers) <= 2
        while commands := await reader.read(4096):
            is_ping = b"PING" in commands
            if not is_mute:
                writer.write(b"+PONG\r\n" if is_ping else b"+OK\r\n" * commands.count(b"CLIENT"))
            is_mute |= is_ping and may_die

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as dying:
        port = dying.sockets[0].getsockname()[1]
        one = RedisStore(f"redis://127.0.0.1:{port}/0?protocol=2", ROOM)
        await asyncio.gather(one.check(), one.check())
        assert len(writers) == 2
        with pytest.raises(StoreUnavailable):
            await one.check()
        await asyncio.gather(one.check(), one.check())
        await one.close()
        for writer in writers:
            writer.close()


async def test_another_value_than_was_asked_for_is_an_error(server: RedisServer) -> None:
    """If Redis returns another response than the one that was asked for, no caller gets it."""
    async with redis(server) as (one, _):
        assert isinstance(one, RedisStore)
        await one.keep("alice", "1", stored("1"))
        (key,) = [key for key in await keys_of(one) if key.endswith(b":1")]
        await one._redis.hset(key, mapping={b"response": b"2\nhers", b"context": b"2\nhers"})
        with pytest.raises(StoreUnavailable):
            await one.response("alice", "1")
        with pytest.raises(StoreUnavailable):
            await one.contexts("alice", ["1"])
