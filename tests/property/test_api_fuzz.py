"""2,000 malformed requests: each is refused, and the next good one is answered; api_fuzz.py runs longer."""

import asyncio

from tests.property.api_fuzz import fuzz


def test_malformed_requests_are_refused_and_good_ones_answered_right_after() -> None:
    seen, wrong = asyncio.run(fuzz(num_http=1400, num_grpc=600, seed=20261122))
    assert wrong == []
    assert sum(seen.values()) == 2000
