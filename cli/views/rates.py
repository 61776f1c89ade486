"""Rates of a fleet, computed from the counters of two descriptions; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PairTransfers:
    """The KV that moves from one worker to another. Without an earlier description, rates are None."""

    producer: str
    consumer: str
    transports: set[str] = field(default_factory=set)
    num_bytes: int = 0
    """Counted since the consumer's start, like the next two fields."""
    done: int = 0
    failed: int = 0
    bytes_per_s: float | None = None
    done_per_s: float | None = None


def transfers(
    previous: dict[str, Any] | None, current: dict[str, Any], elapsed_s: float
) -> list[PairTransfers]:
    """Every pair with any hand-over, the busiest first. The counts are those of the consumer."""
    known = {worker["name"]: worker for worker in previous["workers"]} if previous else {}
    found = []
    for worker in current["workers"]:
        former = known.get(worker["name"])
        before = _earlier_counts(former, worker)
        for producer, pair in _by_producer(worker).items():
            if former is not None and elapsed_s > 0:
                earlier = before.get(producer, PairTransfers(producer, pair.consumer))
                pair.bytes_per_s = max(0, pair.num_bytes - earlier.num_bytes) / elapsed_s
                pair.done_per_s = max(0, pair.done - earlier.done) / elapsed_s
            found.append(pair)
    return sorted(found, key=lambda pair: (-(pair.bytes_per_s or 0.0), -pair.num_bytes))


def path_rates(
    previous: dict[str, Any] | None, current: dict[str, Any], elapsed_s: float
) -> Iterator[tuple[str, int, float | None]]:
    """For each path of the gateway: its name, the number of finished requests, and requests per second."""
    before = previous["gateway"]["paths"] if previous else {}
    for path, count in current["gateway"]["paths"].items():
        is_comparable = previous is not None and elapsed_s > 0
        yield path, count, max(0, count - before.get(path, 0)) / elapsed_s if is_comparable else None


def hit_rate(previous: dict[str, Any] | None, worker: dict[str, Any]) -> float | None:
    """The share of requested tokens found in the worker's prefix cache."""
    return _share("prefix_cache_hits", "prefix_cache_queries", previous, worker)


def acceptance_rate(previous: dict[str, Any] | None, worker: dict[str, Any]) -> float | None:
    """The share of the worker's drafts that were right."""
    return _share("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", previous, worker)


def _share(part: str, whole: str, previous: dict[str, Any] | None, worker: dict[str, Any]) -> float | None:
    """One counter divided by another. Both count from `previous` on. But they count from the worker's start on if
    `previous` has no counts of the worker, or if `whole` has not grown since."""
    now = worker["counters"]
    former = {}
    for known in previous["workers"] if previous else ():
        if (known["name"], known["incarnation"]) == (worker["name"], worker["incarnation"]):
            former = known["counters"]
    for before in (former, {}):
        of_all, of_part = (now.get(key, 0) - before.get(key, 0) for key in (whole, part))
        if of_all > 0:
            return float(of_part / of_all)
    return None


def _earlier_counts(former: dict[str, Any] | None, worker: dict[str, Any]) -> dict[str, PairTransfers]:
    """The counts to subtract.

    There are none if the worker restarted, since its counters then began at zero.
    """
    if former is None or former["incarnation"] != worker["incarnation"]:
        return {}
    return _by_producer(former)


def _by_producer(worker: dict[str, Any]) -> dict[str, PairTransfers]:
    """What the worker has received since its start, without rates."""
    found: dict[str, PairTransfers] = {}
    for peer in worker["kv_peers"]:
        if peer["role"] == "consumer":
            pair = found.setdefault(peer["peer"], PairTransfers(peer["peer"], worker["name"]))
            pair.transports |= {peer["transport"]} - {""}
            pair.num_bytes += int(peer["bytes"])
            pair.done += int(peer["done"])
            pair.failed += int(peer["failed"])
    return found
