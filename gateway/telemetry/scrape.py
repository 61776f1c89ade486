"""GatewayScrape: the state of a gateway and its workers at the moment of a scrape, as metric families."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric

from baton.system.exposition import counter, gauge
from baton.worker import WorkerRole, WorkerState, WorkerStatus
from gateway.requests.attempt import Cause
from gateway.requests.driver import RequestDriver
from gateway.workers.worker_listener import UNCOUNTED, LossCause


class GatewayScrape:
    """Makes the metrics at each scrape. Call `collect` on the gateway's event loop."""

    def __init__(self, driver: RequestDriver, model_name: str, not_ready: Callable[[], str | None]) -> None:
        """`not_ready` returns why no request can be served now, or None if requests can be served."""
        self._driver = driver
        self._model = model_name
        self._not_ready = not_ready

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._workers()

    def _requests(self) -> Iterator[Metric]:
        dispatcher = self._driver.dispatcher
        counts = dispatcher.tally.counters
        yield gauge("gateway_ready", "1 if a request would find workers", [], {(): self._not_ready() is None})
        yield counter(
            "generation_tokens",
            "Tokens generated for clients, including unfinished answers",
            ["model_name"],
            {(self._model,): dispatcher.latencies.num_tokens},
        )
        yield counter("requests_received", "Requests received", [], {(): counts["received"]})
        yield counter(
            "request_migrations",
            "Moves of requests to other workers, by cause",
            ["cause"],
            {(cause.value,): counts[f"migrated_{cause.value}"] for cause in Cause},
        )
        yield gauge("gateway_requests_in_flight", "Requests with workers", [], {(): dispatcher.num_in_flight})
        yield gauge(
            "gateway_requests_queued",
            "Requests that wait for a worker",
            [],
            {(): dispatcher.num_queued},
        )
        yield gauge(
            "gateway_oldest_queued_seconds",
            "Waiting time of the oldest queued request",
            [],
            {(): self._driver.oldest_queued_s},
        )
        yield gauge(
            "pairs_avoided",
            "Pairs of workers that could not exchange KV when they were last tried",
            [],
            {(): len(dispatcher.avoided_pairs)},
        )
        yield counter(
            "gateway_harmful_requests",
            "Requests that were stopped because workers ended under them or could not compute them, and refusals since",
            ["event"],
            {(event,): count for event, count in dispatcher.suspects.counts.items()},
        )
        yield gauge(
            "gateway_harmful_requests_remembered",
            "Requests that are refused if they come again",
            [],
            {(): dispatcher.suspects.num_stopped},
        )

    def _workers(self) -> Iterator[Metric]:
        clients = self._driver.workers.clients
        states = Counter[tuple[str, ...]](
            {(role.value, state.value): 0 for role in WorkerRole for state in WorkerState}
        )
        states.update((client.role.value, client.state.value) for client in clients)
        yield gauge("fleet_workers", "Workers, as this gateway sees them", ["role", "state"], states)
        losses = self._driver.workers.losses
        yield counter(
            "worker_lost",
            "Workers that were lost, by how this gateway noticed it",
            ["cause"],
            {(cause.value,): losses[cause] for cause in LossCause if cause not in UNCOUNTED},
        )
        statuses = self._driver.workers.statuses
        yield gauge(
            "fleet_requests",
            "Requests on workers, as of their last heartbeat",
            ["worker", "role", "state"],
            {key: count for status in statuses for key, count in _requests_on(status)},
        )
        yield gauge(
            "fleet_kv_blocks",
            "KV blocks of workers, as of their last heartbeat",
            ["worker", "role", "state"],
            {key: count for status in statuses for key, count in _blocks_of(status)},
        )


def _requests_on(status: WorkerStatus) -> Iterator[tuple[tuple[str, str, str], int]]:
    counts, role = status.requests, status.role.value
    for state in ("running", "waiting", "waiting_for_remote_kvs"):
        yield (status.ref.name, role, state), getattr(counts, state)


def _blocks_of(status: WorkerStatus) -> Iterator[tuple[tuple[str, str, str], int]]:
    counts, role = status.kv_blocks, status.role.value
    for state in ("free", "referenced", "leased", "quarantined"):
        yield (status.ref.name, role, state), getattr(counts, state)
