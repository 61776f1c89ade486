"""GatewayClient: a thin typed client of the gRPC API, for the command line, tests and benchmarks."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import grpc.aio

from baton.fleet import RolloutStep
from baton.v1 import cluster_service_pb2 as cluster_pb
from baton.v1 import cluster_service_pb2_grpc as cluster_grpc
from baton.v1 import generation_service_pb2 as generation_pb
from baton.v1 import generation_service_pb2_grpc as generation_grpc
from baton.v1 import sampling_pb2 as sampling_pb
from baton.worker import WorkerRole

ROUTING_MODES = {
    None: generation_pb.ROUTING_MODE_UNSPECIFIED,
    "disaggregated": generation_pb.ROUTING_MODE_DISAGGREGATED,
    "local": generation_pb.ROUTING_MODE_LOCAL,
}
FINISH_REASONS = {generation_pb.FINISH_REASON_STOP: "stop", generation_pb.FINISH_REASON_LENGTH: "length"}


class GatewayError(Exception):
    """The server said no, or could not be reached. `code` is gRPC's name for why, such as INVALID_ARGUMENT."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended; the nested mappings hold the fields of Usage, Timing and Placement."""

    finish_reason: str
    usage: dict[str, int]
    timing: dict[str, Any]
    placement: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request; the last one has `completion`."""

    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None


class GatewayClient:
    """An async context manager around one channel to HOST:PORT."""

    def __init__(self, target: str, max_message_mib: int = 16) -> None:
        options = [
            ("grpc.max_receive_message_length", max_message_mib * 2**20),
            # Or a gateway that was restarted after a while is not found again for up to two minutes.
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        self._target = target
        self._channel = grpc.aio.insecure_channel(target, options)
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
        sampling: Mapping[str, Any] | None = None,
        mode: Literal["disaggregated", "local"] | None = None,
        request_id: str = "",
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """Streams a request's events; exactly one of `text`, `token_ids` and `messages` (role, content) is the prompt.

        `sampling` takes the fields of SamplingParams by name. Closing the iterator cancels the request.
        """
        request = generation_pb.GenerateRequest(
            request_id=request_id,
            token_ids=None if token_ids is None else generation_pb.TokenIds(ids=token_ids),
            chat=None if messages is None else _chat(messages),
            sampling_params=sampling_pb.SamplingParams(**(sampling or {})),
            routing_mode=ROUTING_MODES[mode],
            cache_salt=cache_salt,
        )
        if text is not None:
            request.text = text
        call = self._generation.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                completion = _completion(response.finish) if response.HasField("finish") else None
                yield Event(tuple(response.token_ids), response.text, completion)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def abort(self, *request_ids: str) -> int:
        """How many of them were running."""
        try:
            response = await self._generation.Abort(generation_pb.AbortRequest(request_ids=request_ids))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return response.num_aborted

    async def model_info(self) -> dict[str, Any]:
        """The fields of GetModelInfoResponse."""
        try:
            response = await self._generation.GetModelInfo(generation_pb.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return _as_dict(response)

    async def describe(self) -> dict[str, Any]:
        """The fields of DescribeClusterResponse: model, model_path, workers, gateway, nodes, controller."""
        try:
            response = await self._cluster.DescribeCluster(cluster_pb.DescribeClusterRequest())
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return _as_dict(response)

    async def drain(self, worker: str) -> None:
        """Returns once the worker has given away what it had, and is gone for good."""
        try:
            await self._cluster.DrainWorker(cluster_pb.DrainWorkerRequest(worker=worker))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Returns once the worker serves in its new role; GatewayError if it goes on in its old one."""
        try:
            await self._cluster.SetWorkerRole(cluster_pb.SetWorkerRoleRequest(worker=worker, role=role.value))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    async def rollout(self, workers: Sequence[str] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers, or all, one after the other; yields as each new life serves."""
        call = self._cluster.RolloutFleet(cluster_pb.RolloutFleetRequest(workers=workers))
        try:
            async for step in call:
                yield RolloutStep(step.worker, step.incarnation, step.done, step.count)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError) -> GatewayError:
        if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or ""):
            return GatewayError(
                "UNAVAILABLE", f"no gateway answers at {self._target}; is `baton serve` running?"
            )
        return GatewayError(error.code().name, error.details() or "no details")


def _chat(messages: Sequence[tuple[str, str]]) -> generation_pb.Chat:
    turns = [generation_pb.Chat.Message(role=role, content=content) for role, content in messages]
    return generation_pb.Chat(messages=turns)


def _completion(finish: generation_pb.Finish) -> Completion:
    return Completion(
        FINISH_REASONS[finish.reason],
        _as_dict(finish.usage),
        _as_dict(finish.timing),
        _as_dict(finish.placement),
    )


def _as_dict(message: Any) -> dict[str, Any]:
    """A message's fields by name, messages as dicts and repeated ones as lists; None for those that may be absent."""
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
