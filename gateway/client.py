"""GatewayClient: a thin typed client of the gRPC API, for the command line, tests and benchmarks."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2 as details_pb
from grpc_status import rpc_status

from baton.fleet import CacheFlush, RolloutStep
from baton.system.hosts import host_of, is_address, is_loopback
from baton.v1 import cluster_service_pb2 as cluster_pb
from baton.v1 import cluster_service_pb2_grpc as cluster_grpc
from baton.v1 import generation_service_pb2 as generation_pb
from baton.v1 import generation_service_pb2_grpc as generation_grpc
from baton.v1 import sampling_pb2 as sampling_pb
from baton.worker import WorkerRole
from gateway.auth.credentials import NO_CREDENTIALS, Credentials
from gateway.conversation import AnswerEvent, Conversation
from gateway.grpc.chat_convert import conversation_to_message, event_from
from gateway.grpc.status import NO_SUCH_METHOD

KEEPALIVE_TIME_S = 20.0
"""A gateway that has sent nothing for this time during a call is pinged. A gateway accepts pings at an interval of
`gateway.grpc_min_client_ping_s`, 10 s by default."""

KEEPALIVE_TIMEOUT_S = 10.0
"""A gateway that has not answered a ping for this time counts as lost, and its calls fail."""

MAX_RESPONSE_BYTES = 16 * 2**20

ROUTING_MODES = {
    None: generation_pb.ROUTING_MODE_UNSPECIFIED,
    "disaggregated": generation_pb.ROUTING_MODE_DISAGGREGATED,
    "local": generation_pb.ROUTING_MODE_LOCAL,
}
_TLS_FAILURES = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by a trusted CA",
    "Hostname Verification": "its certificate is for another host name",
    "WRONG_VERSION_NUMBER": "it does not use TLS",
    "Failed to create security handshaker": "gRPC cannot use the given CA, or the client's certificate and key",
    "Socket closed": "it requires a client certificate, and got none that it trusts",
}
"""Explanations of TLS failures, by a part of gRPC's message."""
_UNRESOLVED = ("errors resolving", "DNS resolution failed")
"""Parts of gRPC's messages about a host without an address. A call that failed with one of them was never sent."""
FINISH_REASONS = {generation_pb.FINISH_REASON_STOP: "stop", generation_pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Details for programs, which a gateway adds to a gRPC status (the types of google.rpc)."""

    reason: str = ""
    """A more specific reason than the status code, such as INVALID_REQUEST."""
    field: str | None = None
    """The invalid field."""
    retry_after_s: float | None = None
    """After how many seconds the same request may succeed."""
    request_id: str | None = None
    """The request's id in the gateway's log."""


class GatewayError(Exception):
    """The gateway refused a call, or is unreachable. `code` is the name of the gRPC status, such as
    INVALID_ARGUMENT.
    """

    def __init__(self, code: str, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details or ErrorDetails()

    @property
    def advice(self) -> str:
        """What users may do about the error; may be empty."""
        details = self.details
        hints = []
        if details.retry_after_s is not None:
            hints.append(f"try again in {details.retry_after_s:g} s")
        if self.code == "INTERNAL" and details.request_id:
            hints.append(f"the gateway's log has details under request {details.request_id}")
        if self.message == NO_SUCH_METHOD:
            hints.append(
                "the gateway may run an older version of Baton, or this may be the port of another server"
            )
        return "; ".join(hints)


class CallBroken(GatewayError):
    """The connection broke before the answer. The gateway may have received the call, and may still carry it out."""


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How a request ended. The dicts contain the fields of Usage, Timing and Placement."""

    finish_reason: str
    usage: dict[str, int]
    timing: dict[str, Any]
    placement: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One event of a request; the last one has `completion`."""

    token_ids: tuple[int, ...]
    text: str
    """The text as the model wrote it. If the request wanted events, `parts` has the same text as events."""
    completion: GenerationEnd | None
    parts: tuple[AnswerEvent, ...] = ()
    call_ids: tuple[str, ...] = ()
    """The ids of the tool calls that begin in `parts`, in the same order."""


class GatewayClient:
    """An async context manager around one channel to HOST:PORT."""

    def __init__(self, target: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        options = [
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            # Without this, gRPC may need up to two minutes to reconnect to a gateway that restarted.
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # Without these options, a call waits forever if the gateway is stopped or its host is gone.
            ("grpc.keepalive_time_ms", round(KEEPALIVE_TIME_S * 1000)),
            ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.http2.max_pings_without_data", 0),  # else gRPC stops after two pings
            # A proxy cannot reach this machine's loopback. By default, gRPC uses the proxy that http_proxy names.
            ("grpc.enable_http_proxy", int(not is_loopback(host_of(target)))),
        ]
        self._target = target
        self._channel = credentials.channel(target, options)
        self._metadata = credentials.metadata
        self._uses_tls = credentials.uses_tls
        self._generation = generation_grpc.GenerationServiceStub(self._channel)
        self._cluster = cluster_grpc.ClusterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[tuple[str, str]] | None = None,
        conversation: Conversation | None = None,
        sampling: Mapping[str, Any] | None = None,
        mode: Literal["disaggregated", "local"] | None = None,
        request_id: str = "",
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
        affinity_key: str | None = None,
        max_model_len: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestEvent]:
        """Yields a request's events. Closing the iterator cancels the request.

        Exactly one of `text`, `token_ids`, `messages` (role, content) and `conversation` is the prompt. With
        `conversation`, events have `parts`. `sampling` contains fields of SamplingParams by name.
        """
        if sum(prompt is not None for prompt in (text, token_ids, messages, conversation)) != 1:
            raise ValueError("give exactly one of text, token_ids, messages and conversation")
        request = generation_pb.GenerateRequest(
            request_id=request_id,
            token_ids=None if token_ids is None else generation_pb.TokenIds(ids=token_ids),
            chat=_chat(messages, conversation),
            sampling_params=sampling_pb.SamplingParams(**(sampling or {})),
            routing_mode=ROUTING_MODES[mode],
            cache_salt=cache_salt,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            affinity_key=affinity_key,
            max_model_len=max_model_len,
            priority=priority,
        )
        if text is not None:
            request.text = text
        call = self._generation.Generate(request, timeout=timeout_s, metadata=self._metadata)
        async with aclosing(self._responses(call)) as responses:
            async for response in responses:
                yield _event(response)

    async def abort(self, *request_ids: str) -> int:
        """Ends these requests. Returns how many of them were running."""
        request = generation_pb.AbortRequest(request_ids=request_ids)
        response = await self._response(self._generation.Abort, request)
        return int(response.num_aborted)

    async def model_info(self) -> dict[str, Any]:
        """The fields of GetModelInfoResponse."""
        request = generation_pb.GetModelInfoRequest()
        return _as_dict(await self._response(self._generation.GetModelInfo, request))

    async def describe(self) -> dict[str, Any]:
        """The fields of DescribeClusterResponse: model, model_path, workers, gateway, nodes, controller."""
        request = cluster_pb.DescribeClusterRequest()
        return _as_dict(await self._response(self._cluster.DescribeCluster, request))

    async def watch(self, interval_s: float = 1.0) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the result of `describe`, now and after each change. Closing the iterator ends the call."""
        request = cluster_pb.WatchClusterRequest(interval_s=interval_s)
        call = self._cluster.WatchCluster(request, metadata=self._metadata)
        async with aclosing(self._responses(call)) as responses:
            async for response in responses:
                yield _as_dict(response.cluster)

    async def drain(self, worker: str) -> None:
        """Drains a worker. Returns once the worker has no requests any more, and has ended for good."""
        await self._response(self._cluster.DrainWorker, cluster_pb.DrainWorkerRequest(worker=worker))

    async def drain_node(self, node: str, timeout_s: float) -> None:
        """Drains the node of this address or name: the node gets no new workers. Returns once the node has no workers
        any more. Raises GatewayError if the node still has workers after `timeout_s`.
        """
        request = cluster_pb.DrainNodeRequest(node=node, timeout_s=timeout_s)
        await self._response(self._cluster.DrainNode, request)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Changes a worker's role. Returns once the worker serves in the new role. Raises GatewayError if it
        keeps the old role."""
        request = cluster_pb.SetWorkerRoleRequest(worker=worker, role=role.value)
        await self._response(self._cluster.SetWorkerRole, request)

    async def flush_cache(
        self, workers: Sequence[str] = (), *, force: bool = False
    ) -> tuple[CacheFlush, ...]:
        """Empties the prefix caches of these workers, or of all workers. Returns each worker's result."""
        request = cluster_pb.FlushCacheRequest(workers=workers, force=force)
        response = await self._response(self._cluster.FlushCache, request)
        return tuple(CacheFlush(flush.worker, flush.obstacle) for flush in response.workers)

    async def rollout(self, workers: Sequence[str] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers, or all workers, one after another. Yields a step each time that a new process
        serves."""
        request = cluster_pb.RolloutFleetRequest(workers=workers)
        call = self._cluster.RolloutFleet(request, metadata=self._metadata)
        async with aclosing(self._responses(call)) as steps:
            async for step in steps:
                yield RolloutStep(step.worker, step.incarnation, step.done, step.count)

    async def _response(self, method: Any, request: Any) -> Any:
        """The call's response. Raises GatewayError if the call fails."""
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def _responses(self, call: Any) -> AsyncGenerator[Any, None]:
        """Yields a stream's responses. Raises GatewayError if the call fails. Closing the generator cancels
        the call."""
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError) -> GatewayError:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            if "failed to connect" in details:
                return GatewayError("UNAVAILABLE", self._why_unreachable(details))
            if any(sign in details for sign in _UNRESOLVED):
                found = f"the host of {self._target} cannot be found: {details}"
                return GatewayError("UNAVAILABLE", found + self._hint_of_form())
            if "ping timeout" in details:
                return CallBroken("UNAVAILABLE", f"the gateway at {self._target} does not answer any more")
            if not _details_of(error).reason:  # no gateway made this error
                return CallBroken("UNAVAILABLE", details or "no details")
        return GatewayError(error.code().name, details or "no details", _details_of(error))

    def _why_unreachable(self, details: str) -> str:
        """Explains gRPC's message about its last attempt to connect."""
        unreachable = f"no gateway answers at {self._target}{self._hint_of_form()}; is `baton serve` running"
        if not self._uses_tls and "http1.x server" in details:
            return f"{self._target} serves HTTP, not gRPC; use the gateway's gRPC port (gateway.grpc_port)"
        if not self._uses_tls:
            return f"{unreachable}, and does it use TLS?" if "Socket closed" in details else f"{unreachable}?"
        reasons = (reason for sign, reason in _TLS_FAILURES.items() if sign in details)
        reason = next(reasons, None)
        return f"TLS with {self._target} failed: {reason}" if reason else f"{unreachable}?"

    def _hint_of_form(self) -> str:
        """Advice if the target has another form. gRPC accepts it, but takes port 443 if it names no port."""
        return "" if is_address(self._target) else " (use HOST:PORT)"


def _details_of(error: grpc.aio.AioRpcError) -> ErrorDetails:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the status contradicts the call's code, so a proxy created it
        status = None
    parts: dict[str, Any] = {}
    for packed in status.details if status else ():
        violation, info = details_pb.BadRequest(), details_pb.ErrorInfo()
        retry, request = details_pb.RetryInfo(), details_pb.RequestInfo()
        if packed.Unpack(violation) and violation.field_violations:
            parts["field"] = violation.field_violations[0].field
        elif packed.Unpack(info):
            parts["reason"] = info.reason
        elif packed.Unpack(retry):
            parts["retry_after_s"] = retry.retry_delay.ToTimedelta().total_seconds()
        elif packed.Unpack(request):
            parts["request_id"] = request.request_id
    return ErrorDetails(**parts)


def _chat(
    messages: Sequence[tuple[str, str]] | None, conversation: Conversation | None
) -> generation_pb.Chat | None:
    if conversation is not None:
        return conversation_to_message(conversation)
    if messages is None:
        return None
    turns = [generation_pb.Chat.Message(role=role, content=content) for role, content in messages]
    return generation_pb.Chat(messages=turns)


def _event(response: generation_pb.GenerateResponse) -> RequestEvent:
    return RequestEvent(
        tuple(response.token_ids),
        response.text,
        _completion(response.finish) if response.HasField("finish") else None,
        tuple(event for each in response.events if (event := event_from(each)) is not None),
        tuple(each.call_begins.id for each in response.events if each.HasField("call_begins")),
    )


def _completion(finish: generation_pb.Finish) -> GenerationEnd:
    return GenerationEnd(
        FINISH_REASONS[finish.reason],
        _as_dict(finish.usage),
        _as_dict(finish.timing),
        _as_dict(finish.placement),
    )


def _as_dict(message: Any) -> dict[str, Any]:
    """A message's fields by name: messages as dicts, repeated fields as lists, absent fields as None."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _value(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    return [_as_dict(item) for item in value] if field.is_repeated else _as_dict(value)
