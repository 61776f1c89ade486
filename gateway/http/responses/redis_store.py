"""RedisStore: stores responses in a Redis server that several gateways share.

This module needs the extra `redis`; only stores.py imports it. All keys of a caller have the same hash tag,
so a Redis cluster stores them on one node:

    ...:response:ID   a hash: what GET answers, and what a later response needs; expires
    ...:used          a sorted set: when each response was last used
    ...:sizes         a hash: the number of bytes of each response
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.errors import StoreUnavailable
from gateway.http.responses.store import MAX_RESPONSES, StoreBounds, StoredResponse

REDIS_TIMEOUT_S = 2.0
"""How long to wait for a connection, and for each answer."""
MAX_CONNECTIONS = 64
NAMESPACE = "baton:responses:1"
"""Prefix of all keys. Increase its number when the form of the stored values changes."""

RESPONSE, CONTEXT = b"response", b"context"

logger = logging.getLogger(__name__)


class RedisStore:
    """A ResponseStore. Redis itself limits the memory of all callers together (`maxmemory`)."""

    def __init__(self, url: str, bounds: StoreBounds, now: Callable[[], float] = time.time) -> None:
        """`now` returns the time of day, which is the same on all gateways. Raises ValueError if the URL is
        invalid."""
        self._bounds = bounds
        self._now = now
        self._ttl_ms = int(bounds.ttl_s * 1000)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            # A kept connection may have ended, so a failed call is tried once more. A call that timed out is not.
            retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        )
        self._redis: Redis = Redis.from_pool(pool)

    async def check(self) -> None:
        await self._await_answer(self._redis.ping())

    async def keep(self, caller: str, response_id: str, stored: StoredResponse) -> None:
        if stored.num_bytes > self._bounds.caller_bytes:
            logger.warning(
                "response %s is not stored: its %d bytes exceed gateway.response_store_caller_mib",
                response_id,
                stored.num_bytes,
            )
            return
        used, sizes, key = _used(caller), _sizes(caller), _key(caller, response_id)
        now = self._now()
        pipeline = self._redis.pipeline(transaction=True)
        fields: dict[Any, Any] = {
            RESPONSE: _marked(response_id, stored.response),
            CONTEXT: _marked(response_id, stored.context),
        }
        pipeline.hset(key, mapping=fields)
        pipeline.pexpire(key, self._ttl_ms)
        pipeline.zadd(used, {response_id: now})
        pipeline.hset(sizes, response_id, stored.num_bytes)
        pipeline.pexpire(used, self._ttl_ms)
        pipeline.pexpire(sizes, self._ttl_ms)
        pipeline.zrange(used, 0, -1, withscores=True)
        pipeline.hgetall(sizes)
        *_, uses, num_bytes = await self._await_answer(pipeline.execute())
        await self._drop(caller, self._superfluous(uses, num_bytes, now))

    async def response(self, caller: str, response_id: str) -> bytes | None:
        found = await self._await_answer(self._redis.hget(_key(caller, response_id), RESPONSE))
        return _unmarked(response_id, found)

    async def contexts(self, caller: str, response_ids: Sequence[str]) -> list[bytes | None]:
        if not response_ids:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        now = self._now()
        for response_id in response_ids:
            pipeline.hget(_key(caller, response_id), CONTEXT)
            pipeline.pexpire(_key(caller, response_id), self._ttl_ms)
            pipeline.zadd(_used(caller), {response_id: now}, xx=True)
        for index in (_used(caller), _sizes(caller)):
            pipeline.pexpire(index, self._ttl_ms)
        answers = await self._await_answer(pipeline.execute())
        found = answers[: 3 * len(response_ids) : 3]
        return [_unmarked(*each) for each in zip(response_ids, found, strict=True)]

    async def delete(self, caller: str, response_id: str) -> bool:
        return await self._drop(caller, [response_id]) > 0

    async def close(self) -> None:
        await self._redis.aclose()

    async def _drop(self, caller: str, response_ids: Sequence[str]) -> int:
        """Removes responses. Returns how many of them were stored."""
        if not response_ids:
            return 0
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(*[_key(caller, response_id) for response_id in response_ids])
        pipeline.zrem(_used(caller), *response_ids)
        pipeline.hdel(_sizes(caller), *response_ids)
        num_dropped, *_ = await self._await_answer(pipeline.execute())
        return int(num_dropped)

    def _superfluous(
        self, uses: Sequence[tuple[bytes, float]], num_bytes: dict[bytes, bytes], now: float
    ) -> list[str]:
        """Ids of the responses to remove: those that expired, and the least recently used ones beyond the
        bounds of one caller."""
        total = sum(int(num_bytes.get(response_id, 0)) for response_id, _ in uses)
        dropped = []
        for index, (response_id, used_at) in enumerate(uses):
            fits = total <= self._bounds.caller_bytes and len(uses) - index <= MAX_RESPONSES
            if fits and used_at > now - self._bounds.ttl_s:
                break
            dropped.append(response_id.decode())
            total -= int(num_bytes.get(response_id, 0))
        return dropped

    async def _await_answer(self, answer: Any) -> Any:
        """Redis' answer. Raises StoreUnavailable if Redis fails. The error does not contain Redis' address,
        which may contain a password."""
        try:
            return await answer
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, RedisTimeoutError | TimeoutError):
                await self._drop_idle_connections()
            logger.warning("the Redis of gateway.response_store failed: %s", type(error).__name__)
            raise StoreUnavailable(
                "the store of responses cannot be reached at present; try again, or send store: false and the "
                "whole conversation"
            ) from error

    async def _drop_idle_connections(self) -> None:
        """Closes idle connections: they may be as dead as the one that timed out, and each dead one would make a
        request fail."""
        with suppress(RedisError, OSError, TimeoutError):
            await self._redis.connection_pool.disconnect(inuse_connections=False)


def _tag(caller: str) -> str:
    """The hash tag of a caller, whose name may have any characters. Different callers have different tags."""
    return "{" + blake2b(caller.encode(errors="surrogatepass"), digest_size=16).hexdigest() + "}"


def _key(caller: str, response_id: str) -> str:
    return f"{NAMESPACE}:{_tag(caller)}:response:{response_id}"


def _used(caller: str) -> str:
    return f"{NAMESPACE}:{_tag(caller)}:used"


def _sizes(caller: str) -> str:
    return f"{NAMESPACE}:{_tag(caller)}:sizes"


def _marked(response_id: str, value: bytes) -> bytes:
    """The value with its response's id before it. So if a faulty connection returns the value of another response,
    this is detected."""
    return response_id.encode() + b"\n" + value


def _unmarked(response_id: str, value: bytes | None) -> bytes | None:
    if value is None:
        return None
    mark = response_id.encode() + b"\n"
    if not value.startswith(mark):
        raise StoreUnavailable(
            "the store of responses gave another response than the requested one; try again"
        )
    return value[len(mark) :]
