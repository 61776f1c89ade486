"""RedisStore: stores responses in a Redis server that several gateways share.

This module needs the extra `redis`; only stores.py imports it. All keys of a caller have the same hash tag,
so a Redis cluster stores them on one node:

    ...:response:ID   a hash: what GET answers, and what a later response needs; expires
    ...:used          a sorted set: when each response was last used
    ...:sizes         a hash: the number of bytes of each response, and under TOTAL the sum of these numbers

Redis itself chooses the responses to remove, in scripts. So the time to keep a response does not grow with the number
of the caller's responses.
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
NAMESPACE = "baton:responses:2"
"""Prefix of all keys. Increase its number when the form of the stored values changes."""

RESPONSE, CONTEXT = b"response", b"context"
TOTAL = ""
"""A field of the sizes. Clients name responses in paths, so no name is empty, and no client can delete this field."""

_KEEP = f"""
local key, used, sizes = unpack(KEYS)
local id, response, context = unpack(ARGV, 1, 3)
local num_bytes, now, ttl_ms, max_bytes, max_responses = tonumber(ARGV[4]), tonumber(ARGV[5]), unpack(ARGV, 6, 8)
if redis.call('ZCARD', used) == 0 or not redis.call('HGET', sizes, '{TOTAL}') then
    redis.call('DEL', used, sizes)
end
redis.call('HSET', key, '{RESPONSE.decode()}', response, '{CONTEXT.decode()}', context)
redis.call('PEXPIRE', key, ttl_ms)
redis.call('ZADD', used, ARGV[5], id)
local former = tonumber(redis.call('HGET', sizes, id) or 0)
redis.call('HSET', sizes, id, num_bytes)
local total = redis.call('HINCRBY', sizes, '{TOTAL}', num_bytes - former)
redis.call('PEXPIRE', used, ttl_ms)
redis.call('PEXPIRE', sizes, ttl_ms)
local dropped = {{}}
while true do
    local first = redis.call('ZRANGE', used, 0, 1, 'WITHSCORES')
    local oldest, used_at = first[1], first[2]
    if oldest == id then
        oldest, used_at = first[3], first[4]
    end
    local fits = total <= tonumber(max_bytes) and redis.call('ZCARD', used) <= tonumber(max_responses)
    if not oldest or (fits and tonumber(used_at) > now - ttl_ms / 1000) then
        return dropped
    end
    redis.call('ZREM', used, oldest)
    local size = redis.call('HGET', sizes, oldest) or 0
    redis.call('HDEL', sizes, oldest)
    total = redis.call('HINCRBY', sizes, '{TOTAL}', -size)
    dropped[#dropped + 1] = oldest
end
"""
"""Keeps a response. Returns the ids of the caller's responses that must be deleted: those that expired, and the least
recently used ones beyond the bounds of one caller.

A full Redis may evict one of the two indexes. Then both begin anew, without the responses that were kept before: these
expire by themselves."""

_DELETE = f"""
local key, used, sizes = unpack(KEYS)
local size = redis.call('HGET', sizes, ARGV[1])
if size then
    redis.call('ZREM', used, ARGV[1])
    redis.call('HDEL', sizes, ARGV[1])
    redis.call('HINCRBY', sizes, '{TOTAL}', -size)
end
return redis.call('DEL', key)
"""
"""Deletes a response. Returns how many there were."""

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
        self._keep_script = self._redis.register_script(_KEEP)
        self._delete_script = self._redis.register_script(_DELETE)

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
        keys = (_key(caller, response_id), _used(caller), _sizes(caller))
        response, context = (_marked(response_id, text) for text in (stored.response, stored.context))
        bounds = (self._ttl_ms, self._bounds.caller_bytes, MAX_RESPONSES)
        values = (response_id, response, context, stored.num_bytes, self._now(), *bounds)
        dropped = await self._await_answer(self._keep_script(keys, values))
        if dropped:
            await self._await_answer(self._redis.delete(*[_key(caller, each.decode()) for each in dropped]))

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
        keys = (_key(caller, response_id), _used(caller), _sizes(caller))
        return bool(await self._await_answer(self._delete_script(keys, (response_id,))))

    async def close(self) -> None:
        await self._redis.aclose()

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
