"""Cancelling a response that has ended."""

from typing import cast

import pytest

from baton.clock import VirtualClock
from baton.errors import InvalidRequest
from gateway.auth.callers import ANYBODY
from gateway.http.responses.routes import StoredResponses
from gateway.http.responses.store import MemoryStore, RunningResponses, StoreBounds, StoredResponse
from gateway.requests.driver import RequestDriver


async def test_the_status_of_an_ended_response_is_found_without_parsing_its_output() -> None:
    """The output may have tens of megabytes. Here it is no JSON, so that parsing it would fail."""
    store = MemoryStore(StoreBounds(caller_bytes=2**20, ttl_s=100.0), 2**20, VirtualClock())
    response = (
        b'{"id": "resp_a", "object": "response", "status": "incomplete", "output":[{"status":"completed", ...'
    )
    await store.keep(ANYBODY.name, "resp_a", StoredResponse(response, b""))
    stored = StoredResponses(cast("RequestDriver", None), RunningResponses(store))
    with pytest.raises(InvalidRequest, match=r"has ended \(incomplete\)"):
        await stored.cancel(ANYBODY, "resp_a")
