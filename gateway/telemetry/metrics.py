"""GatewayMetrics: counters and histograms of a gateway's requests and calls, in a registry of their own.

If a metric of vLLM has the same name apart from the prefix, both have the same meaning. docs/observability.md lists
both names.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)

from baton.errors import DeadlinePassed, DeadlineTooClose, KeysUnavailable, Overloaded, WorkerUnavailable
from baton.request import FinishReason
from baton.system import exposition
from baton.system.histogram import Histogram as PlainHistogram
from baton.transfer import TransferEventKind
from baton.version import baton_version
from gateway.grammars.check import VERDICTS
from gateway.requests.record import CLIENTS_CHOICES, Outcome, RequestRecord
from gateway.requests.request import Finish
from gateway.telemetry.call_log import INTERNAL_ERROR, CallError
from gateway.timing.request_times import HandoverParts, SeenTransfer, Timing, TtftParts

MAX_CALLERS = 256
"""How many callers are counted by name. Further callers are counted together as `(others)`."""

OTHERS = "(others)"

USUAL_ERRORS = (Overloaded, WorkerUnavailable, DeadlinePassed, DeadlineTooClose)
"""Errors whose counters exist from the start, so that their rates exist before the first such error."""

FINISHED_REASONS = (FinishReason.STOP.value, FinishReason.LENGTH.value, "abort")


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


# The bounds of histograms. If vLLM has the same histogram, Baton's bounds include vLLM's, so that dashboards and alerts
# for vLLM keep their meaning. Lower bounds are added for small models and fast networks.
TTFT_S = _bounds(".001 .0025 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
ITL_S = _bounds(".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
REQUEST_S = _bounds(".01 .05 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
PART_S = _bounds(".0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60")
HANDOVER_S = _bounds(".0005 .001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10")
HANDOVER_BYTES = tuple(2.0**exponent for exponent in range(14, 36, 2))
"""Bounds from 16 KiB to 16 GiB."""
LAG_S = _bounds(".001 .0025 .005 .01 .025 .05 .1 .25 .5 1")


class GatewayMetrics:
    """Use it from one event loop only. Every method is fast, and none raises."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        disable_created_metrics()  # a `_created` series only says when a metric was created
        self.registry = CollectorRegistry()
        self._model = model_name
        self._callers = {""}  # the name for calls without a caller
        self._itl = PlainHistogram(ITL_S)
        self._make_latencies()
        self._make_sizes(max_model_len)
        self._make_requests()
        self._make_handovers()
        self._make_calls()
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "Longest lag of the event loop's timers in a quarter second",
            LAG_S,
        )
        self._longest_stall = Gauge(
            exposition.PREFIX + "event_loop_longest_stall_seconds",
            "Longest stall of the event loop in the last one to two minutes",
            registry=self.registry,
        )
        build = Gauge("baton_build_info", "Always 1", ["version", "model_name"], registry=self.registry)
        build.labels(baton_version(), model_name).set(1)
        self.collect_too(self._itl_histogram)
        ProcessCollector(registry=self.registry)

    def collect_too(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """From now on, each scrape also collects these metrics."""
        self.registry.register(exposition.CollectedOnDemand(collect))

    def first_token(self, waited_s: float) -> None:
        """A client got its first token."""
        self._ttft.observe(waited_s)

    def ended(self, record: RequestRecord) -> None:
        """A request ended, in any way."""
        self._count_outcome(record)
        if record.ttft_parts is not None:
            _observe_parts(self._ttft_part, record.ttft_parts)
        if record.num_attempts:
            self._attempts.inc(record.num_attempts)
            self._prompt_tokens.inc(record.num_prompt_tokens)
        if record.finish is not None:
            self._finished(record, record.finish)

    def http_response(self, method: str, route: str, status: int) -> None:
        """Counts a response. `route` is a route's template, not the client's path, so that the label has few values."""
        self._http_responses.labels(method, route, str(status)).inc()

    def grpc_call_ended(self, method: str, code: str) -> None:
        """Counts a call. `method` is a method that this gateway serves."""
        self._grpc_responses.labels(method, code).inc()

    def call_failed(self, error: CallError) -> None:
        self._call_errors.add(1, error.api, error.error, self._caller(error.caller or ""))

    def connection_refused(self, error: str) -> None:
        """An HTTP connection ended before it became a call. This is not logged, since strangers could fill
        the disk."""
        self._call_errors.add(1, "http", error, "")

    def grammar_checked(self, verdict: str) -> None:
        """Counts a checked grammar. `verdict` is one of VERDICTS."""
        self._grammars.labels(verdict).inc()

    def loop_was_late(self, seconds: float, longest_s: float) -> None:
        """Records the lag that LoopLag measured."""
        self._loop_lag.observe(seconds)
        self._longest_stall.set(longest_s)

    def render(self, accept: str) -> tuple[bytes, str]:
        """A scrape's content, and its content type."""
        return exposition.render(self.registry, accept, (self._outcomes, self._call_errors))

    def _finished(self, record: RequestRecord, finish: Finish) -> None:
        timing = finish.timing
        self._success[finish.reason.value].inc()
        self._paths.labels(record.path or "", finish.placement.reason).inc()
        self._e2e.observe(timing.total_s)
        self._itl.add_all(timing.itl_s)
        if timing.itl_s:
            self._tpot.observe(timing.decode_s / len(timing.itl_s))
        self._prompt_sizes.observe(finish.num_prompt_tokens)
        self._answer_sizes.observe(finish.num_completion_tokens)
        self._cached_tokens.inc(finish.num_cached_tokens)
        self._observe_stages(timing)
        if timing.handover_parts is not None:
            self._handover_gap.observe(timing.handover_s)
            _observe_parts(self._handover_part, timing.handover_parts)
        for seen in timing.transfers:
            self._observe_transfer(seen)

    def _observe_stages(self, timing: Timing) -> None:
        """Records the stages as vLLM defines them: WAITING in any queue, then PREFILL, then DECODE."""
        if (parts := timing.ttft_parts) is None:
            return
        self._queue.observe(parts.queue_s + parts.worker_queue_s)
        self._prefill.observe(parts.prefill_s)
        self._decode.observe(timing.decode_s)
        self._inference.observe(parts.prefill_s + timing.decode_s)

    def _observe_transfer(self, seen: SeenTransfer) -> None:
        record, end = seen.record, seen.record.events[-1].kind
        if end is TransferEventKind.RELEASED:
            self._exposed.labels(record.transport).observe(record.exposed_s)
        elif end is TransferEventKind.VERIFIED:
            self._moving.labels(record.transport).observe(record.moving_s)
            self._bytes.labels(record.transport).observe(record.num_bytes)

    def _count_outcome(self, record: RequestRecord) -> None:
        caller = self._caller(record.caller.name)
        for outcome in Outcome:  # adds 0 to the others, so that a rate over all outcomes has all its parts
            self._outcomes.add(outcome is record.outcome, record.api, outcome.value, caller)
        if record.outcome is Outcome.ABORTED:
            self._success["abort"].inc()
        kind = record.error_kind
        if kind is not None and kind not in CLIENTS_CHOICES:
            self._errors.labels(kind).inc()

    def _caller(self, name: str) -> str:
        if name not in self._callers and len(self._callers) <= MAX_CALLERS:
            self._callers.add(name)
        return name if name in self._callers else OTHERS

    def _itl_histogram(self) -> Iterator[Metric]:
        name, meaning = (
            "inter_token_latency_seconds",
            "Time between two tokens of one request, recorded when it ends",
        )
        yield exposition.histogram(name, meaning, ["model_name"], {(self._model,): self._itl.counts()})

    def _make_latencies(self) -> None:
        of_model, latency = self._histogram_of_model, REQUEST_S
        self._ttft = of_model("time_to_first_token_seconds", "Time to first token", TTFT_S)
        self._tpot = of_model(
            "request_time_per_output_token_seconds", "Mean time between tokens of a request", ITL_S
        )
        self._e2e = of_model("e2e_request_latency_seconds", "Total time of a request", latency)
        self._queue = of_model("request_queue_time_seconds", "Time in queues of gateway and worker", latency)
        self._prefill = of_model("request_prefill_time_seconds", "From first step to first token", latency)
        self._decode = of_model("request_decode_time_seconds", "From first token to last", latency)
        self._inference = of_model("request_inference_time_seconds", "Prefill and decode", latency)
        self._ttft_part = self._parts("ttft_part_seconds", "Parts of the time to first token", TtftParts)

    def _make_sizes(self, max_model_len: int) -> None:
        sizes = _one_two_five(max_model_len)
        self._prompt_sizes = self._histogram_of_model(
            "request_prompt_tokens", "Prompt tokens per request", sizes
        )
        self._answer_sizes = self._histogram_of_model(
            "request_generation_tokens", "Answer tokens per request", sizes
        )
        self._prompt_tokens = self._counter_of_model(
            "prompt_tokens", "Prompt tokens of requests that reached workers"
        )
        self._cached_tokens = self._counter_of_model(
            "prompt_tokens_cached", "Prompt tokens found in prefix caches"
        )

    def _make_requests(self) -> None:
        success = self._counter(
            "request_success",
            "Requests that ended by themselves, or were aborted",
            "model_name",
            "finished_reason",
        )
        self._success = {reason: success.labels(self._model, reason) for reason in FINISHED_REASONS}
        self._outcomes = exposition.LargeCounter(
            "requests", "Requests that are over", ["api", "outcome", "caller"]
        )
        self._errors = self._counter(
            "request_errors", "Requests without an answer, by what was wrong", "error"
        )
        for error in USUAL_ERRORS:
            self._errors.labels(error.__name__)
        self._attempts = self._counter("request_attempts", "Placements of requests on workers")
        self._paths = self._counter(
            "request_paths", "Finished requests, by path and reason", "path", "reason"
        )

    def _make_handovers(self) -> None:
        by, seconds = "transport", HANDOVER_S
        self._exposed = self._histogram(
            "kv_handover_exposed_seconds",
            "From the end of the prefill until all blocks were verified",
            seconds,
            by,
        )
        self._moving = self._histogram(
            "kv_handover_moving_seconds", "From the first block's arrival to the last one's", seconds, by
        )
        self._bytes = self._histogram("kv_handover_bytes", "KV bytes moved", HANDOVER_BYTES, by)
        self._handover_gap = self._histogram(
            "handover_gap_seconds", "From token 0 to token 1 at the gateway", seconds
        )
        self._handover_part = self._parts(
            "handover_part_seconds", "Parts of the time from token 0 to token 1", HandoverParts
        )

    def _make_calls(self) -> None:
        self._http_responses = self._counter("http_responses", "HTTP responses", "method", "route", "status")
        self._grpc_responses = self._counter("grpc_calls", "Finished gRPC calls", "method", "code")
        self._call_errors = exposition.LargeCounter(
            "call_errors", "Calls answered with an error, by what was wrong", ["api", "error", "caller"]
        )
        self._grammars = self._counter(
            "grammar_checks", "Grammars checked before they reach a worker", "verdict"
        )
        for verdict in VERDICTS:
            self._grammars.labels(verdict)
        for error, api in product((INTERNAL_ERROR, KeysUnavailable.__name__), ("grpc", "http")):
            self._call_errors.add(0, api, error, "")  # starts at 0, so that an alert sees the first error

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(exposition.PREFIX + name, meaning, labels, registry=self.registry)

    def _counter_of_model(self, name: str, meaning: str) -> Counter:
        return self._counter(name, meaning, "model_name").labels(self._model)

    def _histogram_of_model(self, name: str, meaning: str, bounds: Iterable[float]) -> Histogram:
        return self._histogram(name, meaning, bounds, "model_name").labels(self._model)

    def _histogram(self, name: str, meaning: str, bounds: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            exposition.PREFIX + name, meaning, labels, buckets=tuple(bounds), registry=self.registry
        )

    def _parts(self, name: str, meaning: str, kind: type[TtftParts | HandoverParts]) -> dict[str, Histogram]:
        """One histogram for each field of `kind`, by the field's name."""
        family = self._histogram(name, meaning, PART_S, "part")
        return {part.name: family.labels(part.name.removesuffix("_s")) for part in fields(kind)}


def _observe_parts(histograms: dict[str, Histogram], parts: TtftParts | HandoverParts) -> None:
    for name, histogram in histograms.items():
        histogram.observe(getattr(parts, name))


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    steps = (factor * 10.0**exponent for exponent in range(len(str(largest))) for factor in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)
