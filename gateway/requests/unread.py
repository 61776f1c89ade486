"""Unread: what a client has yet to read of its answer; bounded, whatever workers and clients do.

Workers are never held up by who reads: their outputs are taken in as they come, and wait here. What waits together goes
out together, so a slow reader costs fewer messages, not more.
"""

import asyncio
from array import array

from baton.errors import SlowReader
from baton.request import TokenLogprobs
from gateway.requests.client_request import Delta, Finish


class Unread:
    """Of one request; it has one reader."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._token_ids = array("I")
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._is_empty = True
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """SlowReader if more waits then than may."""
        self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        self._finish = delta.finish
        self._is_empty = False
        self._news.set()
        if len(self._token_ids) > self._max_tokens:
            raise SlowReader(
                f"the client reads too slowly: {len(self._token_ids)} tokens of its answer wait, and at most "
                f"{self._max_tokens} may"
            )

    def fail(self, error: Exception) -> None:
        """`read` raises it, once, when all that came before is read."""
        self._error = error
        self._news.set()

    def cut_short(self, error: Exception) -> None:
        """`read` raises it, once, and what was not read is forgotten."""
        self._take()
        self.fail(error)

    async def read(self) -> Delta:
        """All that waits, as one delta, as soon as there is something; or what it failed with."""
        await self._news.wait()
        self._news.clear()
        if not self._is_empty:
            if self._error is not None:
                self._news.set()
            return self._take()
        assert self._error is not None
        error, self._error = self._error, None
        raise error

    def _take(self) -> Delta:
        delta = Delta(tuple(self._token_ids), "".join(self._text), tuple(self._logprobs), self._finish)
        self._token_ids = array("I")
        self._text.clear()
        self._logprobs.clear()
        self._finish = None
        self._is_empty = True
        return delta
