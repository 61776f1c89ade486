"""Dispatcher: admits requests, sends their legs to workers, and sees each through to exactly one end.

The one place that knows both clients' requests and workers; speaks no gRPC.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig
from baton.curve import PlaneKeys
from baton.errors import InvalidRequest, Overloaded, RequestAborted, RequestError, WorkerUnavailable
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from baton.messages import KVEvents
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import MAX_SEED, SamplingParams
from baton.worker import WorkerEndpoint, WorkerStatus
from gateway.client_request import ClientRequest, Delta
from gateway.fleet import Fleet
from gateway.routing.placement import Ask, Mode, Placement
from gateway.routing.router import Router
from gateway.text import TextStream

logger = logging.getLogger(__name__)

LoadFailurePolicy = Literal["retry", "recompute", "fail"]

MAX_ATTEMPTS = 3
"""The last one needs no prefill worker, unless the request requires one."""

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A validated, tokenised request of a client."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    text: TextStream
    priority: int = 0
    cache_salt: str | None = None
    mode: Mode | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Lost:
    """A worker that had a leg is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Aborted:
    """Somebody else than the caller ended the request."""


_Event = tuple[str, RequestOutput | _Lost] | _Aborted


@dataclass(slots=True)
class _Attempt:
    """One try at a request: its legs, by worker, and what they report."""

    engine_request_id: str
    placement: Placement
    events: "asyncio.Queue[_Event]"
    open_legs: set[str] = field(default_factory=set)
    decoder_copes: bool = False
    """The decode leg computes a prompt that does not arrive by itself."""


class _AttemptFailed(Exception):
    """This attempt came to nothing, through no fault of the request, but of `worker`."""

    def __init__(
        self,
        worker: str,
        reason: str,
        kind: ErrorKind = ErrorKind.INTERNAL,
        *,
        is_prompt_lost: bool = False,
        may_ask_again: bool = False,
    ) -> None:
        super().__init__(reason)
        self.worker = worker
        self.kind = kind
        self.is_prompt_lost = is_prompt_lost
        """The decode worker is well, but has no prompt to go on with."""
        self.may_ask_again = may_ask_again
        """The worker was out of reach. As soon as the fleet has it back, it is as good as any other."""

    def as_final(self, request: ClientRequest) -> RequestError:
        """What the client is told when there is nobody left to ask."""
        if self.kind is ErrorKind.OVERLOADED:
            return Overloaded(str(self), RETRY_AFTER_S)
        return WorkerUnavailable(f"gave up after {request.num_attempts} attempt(s): {self}")


class Dispatcher:
    """Everything in flight at one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        prefix_key: bytes,
        load_failure_policy: LoadFailurePolicy,
        clock: Clock,
    ) -> None:
        self._config = config
        self._load_failure_policy = load_failure_policy
        self._clock = clock
        self._router = Router(config, prefix_key)
        self._fleet = Fleet(network, keys, self)
        self._requests: dict[str, asyncio.Queue[_Event]] = {}
        self._attempts: dict[str, _Attempt] = {}
        self.paths: Counter[str] = Counter(disaggregated=0, local=0, fallback=0)
        """Finished requests by the path they really took."""

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def router(self) -> Router:
        return self._router

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas up to the one with `finish`, or raises a RequestError.

        Closing the generator ends the request everywhere.
        """
        self._admit(generation)
        params = generation.sampling_params
        if params.seed is None:  # so that it can be continued elsewhere, whatever happens
            params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        request = ClientRequest(len(generation.prompt_token_ids), params, generation.text, self._clock.now())
        try:
            async with aclosing(self._attempts_at(generation, request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            del self._requests[generation.request_id]

    def abort(self, request_id: str) -> bool:
        """Ends a request by its caller's id; False if there is none."""
        events = self._requests.get(request_id)
        if events is None:
            return False
        events.put_nowait(_Aborted())
        return True

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        self._fleet.add(endpoint)

    async def wait_for_worker(self, name: str) -> None:
        await self._fleet.wait_for(name)

    def remove_worker(self, name: str, reason: str) -> None:
        self._fleet.remove(name, reason)

    async def stop(self) -> None:
        await self._fleet.stop()

    # what the fleet says: WorkerListener

    def heard(self, status: WorkerStatus) -> None:
        self._router.heard(status)

    def outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            attempt = self._attempts.get(output.request_id)
            if attempt is not None:
                attempt.events.put_nowait((worker, output))

    def kv_events(self, worker: str, events: KVEvents) -> None:
        """No policy follows them."""

    def lost(self, worker: str, reason: str) -> None:
        logger.warning("what worker %s had is lost: %s", worker, reason)
        self._router.gone(worker)
        for attempt in self._attempts.values():
            if worker in attempt.open_legs:
                attempt.events.put_nowait((worker, _Lost(reason)))

    def _admit(self, generation: Generation) -> None:
        if generation.request_id in self._requests:
            raise InvalidRequest("request_id", f"{generation.request_id!r} is in use by a running request")
        if len(self._requests) >= self._config.max_in_flight:
            raise Overloaded(
                f"{len(self._requests)} requests are in flight, which is the limit", RETRY_AFTER_S
            )
        self._requests[generation.request_id] = asyncio.Queue()

    async def _attempts_at(
        self, generation: Generation, request: ClientRequest
    ) -> AsyncGenerator[Delta, None]:
        """Tries one placement after the other until the request is complete, or nobody is left to ask."""
        failures: dict[str, _AttemptFailed] = {}
        while True:
            try:
                failed = [worker for worker, failure in failures.items() if not failure.may_ask_again]
                async with aclosing(self._attempt(generation, request, failed)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except _AttemptFailed as failure:
                logger.warning("request %s: %s: %s", generation.request_id, failure.worker, failure)
                failures[failure.worker] = failure
                if self._time_left(generation, request) == 0.0:
                    raise RequestAborted("the request's deadline passed") from failure
                is_final = failure.is_prompt_lost and self._load_failure_policy == "fail"
                if is_final or request.num_attempts >= MAX_ATTEMPTS:
                    raise failure.as_final(request) from failure
            except WorkerUnavailable as nobody:
                if not failures:
                    raise
                last = list(failures.values())[-1]
                raise last.as_final(request) from nobody

    async def _attempt(
        self, generation: Generation, request: ClientRequest, failed: Collection[str]
    ) -> AsyncGenerator[Delta, None]:
        is_last = request.num_attempts + 1 == MAX_ATTEMPTS and not self._requires_prefill(generation)
        placement = self._router.route(
            Ask(
                token_ids=generation.prompt_token_ids,
                max_new_tokens=request.sampling_params.max_tokens,
                cache_salt=generation.cache_salt,
                mode=generation.mode,
                excluded=failed,
                without_prefill=is_last,
            )
        )
        attempt = _Attempt(secrets.token_hex(16), placement, self._requests[generation.request_id])
        self._attempts[attempt.engine_request_id] = attempt
        request.begin_attempt(placement, self._clock.now())
        try:
            await self._submit(generation, request, placement, attempt)
            while True:
                event = await attempt.events.get()
                if isinstance(event, _Aborted):
                    raise RequestAborted(f"request {generation.request_id} was aborted")
                delta = self._take(event, request, placement, attempt)
                if delta is None:
                    continue
                if delta.finish is not None:
                    self.paths[request.path] += 1
                    await self._close(attempt)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            await asyncio.shield(self._close(attempt))

    async def _submit(
        self, generation: Generation, request: ClientRequest, placement: Placement, attempt: _Attempt
    ) -> None:
        """Sends all legs at once; the first to be told is the one that has to make room."""
        leg = EngineRequest(
            request_id=attempt.engine_request_id,
            prompt_token_ids=generation.prompt_token_ids,
            sampling_params=request.sampling_params,
            priority=generation.priority,
            timeout_s=self._time_left(generation, request),
            cache_salt=generation.cache_salt,
        )
        if placement.prefill is None:
            await self._send_leg(placement.decode, leg, attempt)
            return
        transfer_id = secrets.token_hex(16)
        number = request.num_attempts - 1
        prefill, decode = self._ref(placement.prefill), self._ref(placement.decode)
        on_failure = self._on_load_failure(generation)
        attempt.decoder_copes = on_failure is OnLoadFailure.RECOMPUTE
        to_decode = KVTransferParams(TransferRole.CONSUMER, transfer_id, number, prefill, on_failure)
        to_prefill = KVTransferParams(TransferRole.PRODUCER, transfer_id, number, decode, on_failure)
        await self._send_leg(placement.decode, replace(leg, kv_transfer=to_decode), attempt)
        await self._send_leg(placement.prefill, replace(leg, kv_transfer=to_prefill), attempt)

    async def _send_leg(self, worker: str, leg: EngineRequest, attempt: _Attempt) -> None:
        client = self._fleet.client(worker)
        if client is None:
            raise _AttemptFailed(worker, "lost before the request was sent")
        attempt.open_legs.add(worker)
        self._router.sent(worker, attempt.placement)
        await client.submit(leg)

    def _take(
        self,
        event: tuple[str, RequestOutput | _Lost],
        request: ClientRequest,
        placement: Placement,
        attempt: _Attempt,
    ) -> Delta | None:
        worker, news = event
        is_prefill = worker == placement.prefill
        if isinstance(news, _Lost):
            # What a prefill worker has handed over does not need it any more.
            if worker not in attempt.open_legs:
                return None
            is_decoding = attempt.open_legs != {worker}
            if is_prefill and attempt.decoder_copes and is_decoding:
                self._close_leg(worker, attempt)
                return None
            reason = f"the worker was lost: {news.reason}"
            raise _AttemptFailed(worker, reason, is_prompt_lost=is_prefill, may_ask_again=True)
        if news.request_id != attempt.engine_request_id:
            return None  # of an attempt that was given up
        if news.finish_reason is not None:
            self._close_leg(worker, attempt)
        if news.finish_reason is FinishReason.ABORT and attempt.open_legs:
            return None  # if the prefill leg ends the request itself, it tells the decode leg, and then us
        if news.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            request.note_times(worker, news)
            copes = attempt.decoder_copes and attempt.open_legs
            if is_prefill and news.error_kind is ErrorKind.INTERNAL and copes:
                return None
            raise _failure(placement, is_prefill, news)
        has_decoded = not is_prefill and placement.prefill is not None and news.stage_times is not None
        if has_decoded and news.stage_times:
            self._router.measured(placement, news.stage_times)
            if not news.stage_times.transfer_bytes:
                request.fell_back()
        delta = request.accept(worker, news, self._clock.now())
        if not attempt.open_legs and (delta is None or delta.finish is None):
            raise _AttemptFailed(placement.decode, "no worker goes on with it")
        return delta

    async def _close(self, attempt: _Attempt) -> None:
        """Ends what is left of an attempt on its workers; idempotent."""
        self._attempts.pop(attempt.engine_request_id, None)
        for worker in list(attempt.open_legs):
            self._close_leg(worker, attempt)
            if client := self._fleet.client(worker):
                await client.abort((attempt.engine_request_id,))

    def _close_leg(self, worker: str, attempt: _Attempt) -> None:
        if worker in attempt.open_legs:
            attempt.open_legs.remove(worker)
            self._router.ended(worker, attempt.placement)

    def _on_load_failure(self, generation: Generation) -> OnLoadFailure:
        """A request that requires disaggregation is never computed by the decode worker in silence."""
        if self._load_failure_policy == "recompute" and not self._requires_prefill(generation):
            return OnLoadFailure.RECOMPUTE
        return OnLoadFailure.REPORT

    def _requires_prefill(self, generation: Generation) -> bool:
        return generation.mode is Mode.DISAGGREGATED or self._config.require_disaggregated

    def _ref(self, worker: str) -> WorkerRef:
        client = self._fleet.client(worker)
        if client is None:
            raise _AttemptFailed(worker, "lost before the request was sent")
        return client.endpoint.ref

    def _time_left(self, generation: Generation, request: ClientRequest) -> float | None:
        if generation.timeout_s is None:
            return None
        return max(0.0, generation.timeout_s - (self._clock.now() - request.arrived_at))


def _failure(placement: Placement, is_prefill: bool, output: RequestOutput) -> RequestError | _AttemptFailed:
    """What an unhappy end of a leg means for the request."""
    reason, kind = output.error or f"ended with {output.finish_reason}", output.error_kind
    if kind is ErrorKind.INVALID_REQUEST:
        return InvalidRequest(*_split_field(reason))
    is_prompt_lost = kind is ErrorKind.KV_LOAD_FAILED or (is_prefill and kind is ErrorKind.INTERNAL)
    leg = "prefill" if is_prefill else "decode"
    is_prefills_fault = (is_prefill or is_prompt_lost) and placement.prefill is not None
    worker = placement.prefill if is_prefills_fault and placement.prefill else placement.decode
    return _AttemptFailed(worker, f"the {leg} leg failed: {reason}", kind, is_prompt_lost=is_prompt_lost)


def _split_field(reason: str) -> tuple[str, str]:
    """The field that a worker's refusal begins with; see InvalidRequest."""
    name, _, message = reason.partition(": ")
    return (name, message) if message else ("request", reason)
