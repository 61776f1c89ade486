"""A client of Baton's gRPC API for applications: one file to copy, on `grpcio` and the generated package `baton.v1`.

    from baton_client import BatonClient

    async with BatonClient("10.0.0.1:50051", "10.0.0.2:50051", api_key=key) as client:
        async for part in client.generate(messages=[("user", "Why is the sky blue?")], max_tokens=200):
            print(part.text, end="")

Pass the addresses of all gateways of a fleet. The client uses them in turn. If a gateway does not answer or dies, its
requests continue on another gateway.

* The client retries after UNAVAILABLE (no gateway, or no worker), CANCELLED (from a gateway that stops) and
  RESOURCE_EXHAUSTED (no room). A request has at most `Retry.attempts` attempts. The wait doubles each time, and is at
  least as long as the gateway suggests (`retry-after-ms`). All other errors are raised at once.
* The caller gets each token once. If a stream breaks, the client sends the request again with the same seed (it draws
  one if the caller gives none). So another gateway's answer begins with the same tokens. The client compares them, and
  leaves them out. If they differ, for example after an update of the model, the error is DATA_LOSS.
* `timeout_s` limits all attempts together. If you leave the loop, or cancel its task, the request also ends on the
  workers.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

import grpc
import grpc.aio

from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1 import sampling_pb2

MAX_MESSAGE_BYTES = 16 * 2**20
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without this, gRPC may need up to two minutes to reconnect to a gateway that restarted.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # If a gateway's machine fails, no connection is closed; pings detect it. Gateways accept a ping every ten seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_FREE_NAME_TIMEOUT_S = 2.0
_UNREACHABLE = ("UNAVAILABLE", "CANCELLED")
"""Statuses after which another gateway may answer. With CANCELLED, gRPC ends calls that a stopping gateway has not
begun."""
_MODES = {
    None: pb.ROUTING_MODE_UNSPECIFIED,
    "disaggregated": pb.ROUTING_MODE_DISAGGREGATED,
    "local": pb.ROUTING_MODE_LOCAL,
}


class BatonError(Exception):
    """A gateway refused the call, or none was reachable. `code` is the name of gRPC's status: INVALID_ARGUMENT."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        """After how many seconds the same request may succeed; None: the gateway did not say."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and when to retry. With `attempts=1`, there are no retries."""

    attempts: int = 5
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    may_resume: bool = True
    """Whether to retry even after the first token. If not, a stream that breaks after this token raises its error."""

    def wait_s(self, failed: int, hint_s: float | None, rng: random.Random) -> float:
        """How long to wait after `failed` failed attempts. The time doubles each time. A random part of it is left
        out, so that clients do not retry at the same moment."""
        backoff_s = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failed - 1))
        return max(backoff_s * rng.uniform(0.5, 1.0), hint_s or 0.0)


@dataclass(frozen=True, slots=True)
class TLS:
    """The contents of PEM files. `certificate` and `key` belong to this client; gateways with mTLS require them."""

    authorities: bytes | None = None
    """The CAs that may have signed the gateway's certificate. None: those that gRPC trusts by default."""
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams. sampling.proto describes each field and its default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_schema: str
    regex: str
    lark_grammar: str


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended, and its tokens, times and workers; with several attempts, those of the last attempt."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """How many of the prompt's tokens were found in a prefix cache."""
    ttft_s: float
    total_s: float
    prefill_worker: str
    """Empty if the decode worker computed the prompt by itself."""
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of an answer. Text may lag behind tokens: a character or stop string may need several tokens."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None
    """Set only in the last part."""
    events: tuple[pb.AnswerEvent, ...] = ()
    """The text as events, including reasoning and tool calls; empty unless `chat` has tools or `events`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that the gateway serves."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


class BatonClient:
    """An async context manager around a channel to each of `targets` (HOST:PORT). Requests may run concurrently."""

    def __init__(
        self,
        *targets: str,
        api_key: str | None = None,
        tls: TLS | None = None,
        retry: Retry | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`rng` draws seeds and waits. Without `tls`, nothing is encrypted, not even the API key."""
        if not targets:
            raise ValueError("name at least one gateway, as HOST:PORT")
        self._targets = targets
        self._channels = [_channel(target, tls) for target in targets]
        self._stubs = [pb_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retry = retry or Retry()
        self._rng = rng or random.Random()
        self._turn = count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all channels, and ends requests that still run."""
        await asyncio.gather(*[channel.close() for channel in self._channels])

    async def generate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[tuple[str, str]] | None = None,
        chat: pb.Chat | None = None,
        request_id: str = "",
        mode: Literal["disaggregated", "local"] | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
        max_model_len: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Part, None]:
        """Streams an answer. Pass exactly one of `text`, `token_ids`, `messages` (role, content) and `chat` as prompt.

        `abort` ends the request with this `request_id`. Raises BatonError.
        """
        if sum(prompt is not None for prompt in (text, token_ids, messages, chat)) != 1:
            raise ValueError("give exactly one of text, token_ids, messages and chat")
        if "seed" not in sampling:  # so that a retry on any gateway gives the same answer
            sampling["seed"] = self._rng.getrandbits(63)
        request = pb.GenerateRequest(
            request_id=request_id,
            token_ids=None if token_ids is None else pb.TokenIds(ids=token_ids),
            chat=chat if messages is None else _chat(messages),
            sampling_params=sampling_pb2.SamplingParams(**sampling),
            routing_mode=_MODES[mode],
            cache_salt=cache_salt,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            max_model_len=max_model_len,
            priority=priority,
        )
        if text is not None:
            request.text = text
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answer = _Answer()
        first = next(self._turn)
        for attempt in count():
            stub = self._stubs[(first + attempt) % len(self._stubs)]
            try:
                async with aclosing(self._attempt(stub, request, answer, deadline)) as parts:
                    async for part in parts:
                        yield part
                return
            except BatonError as error:
                await self._wait_or_raise(error, attempt + 1, answer, deadline)

    async def abort(self, request_id: str) -> bool:
        """Ends this request. Returns whether it ran on any gateway."""
        request = pb.AbortRequest(request_ids=[request_id])
        calls = [stub.Abort(request, metadata=self._metadata) for stub in self._stubs]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if any(isinstance(answer, pb.AbortResponse) and answer.num_aborted for answer in answers):
            return True
        for answer in answers:
            if isinstance(answer, grpc.aio.AioRpcError):
                raise _error_of(answer) from None
            if isinstance(answer, BaseException):
                raise answer
        return False

    async def model_info(self) -> ModelInfo:
        """Asks the gateways in turn for the model's name and limits, until one answers."""
        for attempt in count(1):
            stub = self._stubs[next(self._turn) % len(self._stubs)]
            try:
                info = await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await self._wait_or_raise(_error_of(error), attempt, _Answer(), None)
            else:
                return ModelInfo(
                    info.model,
                    info.max_model_len,
                    info.vocab_size,
                    tuple(info.eos_token_ids),
                    info.has_chat_template,
                )
        raise AssertionError("unreachable")

    async def _attempt(
        self,
        stub: "pb_grpc.GenerationServiceAsyncStub",  # only type checkers know this name
        request: pb.GenerateRequest,
        answer: "_Answer",
        deadline: float | None,
    ) -> AsyncGenerator[Part, None]:
        if answer.has_begun and request.request_id:
            await self._free_name(stub, request.request_id)
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        call = stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        answer.begin()
        try:
            async for response in call:
                if (part := answer.take(response)) is not None:
                    yield part
            if not answer.is_over:
                raise BatonError("UNAVAILABLE", "the stream ended before the answer did")
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        finally:
            call.cancel()

    async def _free_name(self, stub: "pb_grpc.GenerationServiceAsyncStub", request_id: str) -> None:
        """Ends an earlier attempt with this id. The gateway may not have noticed yet that its connection broke."""
        request = pb.AbortRequest(request_ids=[request_id])
        with suppress(grpc.aio.AioRpcError):
            await stub.Abort(request, timeout=_FREE_NAME_TIMEOUT_S, metadata=self._metadata)

    async def _wait_or_raise(
        self, error: BatonError, failed: int, answer: "_Answer", deadline: float | None
    ) -> None:
        is_final = failed >= self._retry.attempts or (answer.token_ids and not self._retry.may_resume)
        if is_final or not _may_pass(error):
            raise error
        if error.code in _UNREACHABLE and failed % len(self._stubs):
            return  # this gateway is unreachable, so try the next one at once
        wait_s = self._retry.wait_s(failed, error.retry_after_s, self._rng)
        if deadline is not None and time.monotonic() + wait_s >= deadline:
            raise error
        await asyncio.sleep(wait_s)


class _Answer:
    """The part of an answer that the caller has, and the progress of the current attempt."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.is_over = False
        self.has_begun = False
        self._num_tokens = 0
        self._num_characters = 0
        self._num_units = 0
        self._num_known_units = 0
        """How much of the events the caller has: the characters of text, and 1 for each event without text."""

    def begin(self) -> None:
        """A new attempt begins. It repeats the answer from the beginning."""
        self.has_begun = True
        self._num_tokens = self._num_characters = self._num_units = 0

    def take(self, response: pb.GenerateResponse) -> Part | None:
        """The new part of a response; None if nothing is new. BatonError if it contradicts what the caller has."""
        num_old = _num_known(self._num_tokens, len(response.token_ids), len(self.token_ids))
        num_old_characters = _num_known(self._num_characters, len(response.text), len(self.text))
        new_tokens, new_text = response.token_ids[num_old:], response.text[num_old_characters:]
        known = self.token_ids[self._num_tokens : self._num_tokens + num_old]
        known_text = self.text[self._num_characters : self._num_characters + num_old_characters]
        self._num_tokens += len(response.token_ids)
        self._num_characters += len(response.text)
        self.is_over = response.HasField("finish")
        ends_short = self.is_over and self._num_tokens < len(self.token_ids)
        if (
            response.token_ids[:num_old] != known
            or response.text[:num_old_characters] != known_text
            or ends_short
        ):
            raise BatonError("DATA_LOSS", "on a retry, the service gave another answer than before")
        self.token_ids += new_tokens
        self.text += new_text
        events = self._new_events(response.events)
        if not new_tokens and not new_text and not events and not self.is_over:
            return None
        finish = _finish(response.finish) if self.is_over else None
        return Part(tuple(new_tokens), new_text, finish, tuple(events))

    def _new_events(self, events: Iterable[pb.AnswerEvent]) -> list[pb.AnswerEvent]:
        """The events that the caller does not have. If the caller has the beginning of an event's text, this beginning
        is left out. It is not compared, since the tokens were compared."""
        news = []
        for event in events:
            kind = event.WhichOneof("event") or ""
            owner, name = (event.arguments_delta, "json") if kind == "arguments_delta" else (event, kind)
            piece = getattr(owner, name, None)
            size = len(piece) if isinstance(piece, str) else 1
            num_old = _num_known(self._num_units, size, self._num_known_units)
            self._num_units += size
            if num_old < size:
                if isinstance(piece, str):
                    setattr(owner, name, piece[num_old:])
                news.append(event)
        self._num_known_units = max(self._num_known_units, self._num_units)
        return news


def _num_known(position: int, size: int, num_known: int) -> int:
    """How much of a piece of this size, at this position, the caller already has."""
    return max(0, min(size, num_known - position))


def _channel(target: str, tls: TLS | None) -> grpc.aio.Channel:
    # By default, gRPC uses the proxy that http_proxy names, even for a gateway on this machine.
    is_remote = not target.startswith(("127.", "[::1]:", "localhost:"))
    options = [*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(is_remote))]
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, options)


def _chat(messages: Sequence[tuple[str, str]]) -> pb.Chat:
    return pb.Chat(messages=[pb.Chat.Message(role=role, content=content) for role, content in messages])


def _finish(finish: pb.Finish) -> Finish:
    return Finish(
        reason="length" if finish.reason == pb.FINISH_REASON_LENGTH else "stop",
        prompt_tokens=finish.usage.prompt_tokens,
        completion_tokens=finish.usage.completion_tokens,
        cached_tokens=finish.usage.cached_tokens,
        ttft_s=finish.timing.ttft_s,
        total_s=finish.timing.total_s,
        prefill_worker=finish.placement.prefill,
        decode_worker=finish.placement.decode,
    )


def _may_pass(error: BatonError) -> bool:
    """Whether a retry may succeed. RESOURCE_EXHAUSTED without `retry-after-ms` means that a message is too large."""
    is_overloaded = error.code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None
    return error.code in _UNREACHABLE or is_overloaded


def _error_of(error: grpc.aio.AioRpcError) -> BatonError:
    trailers = dict(error.trailing_metadata() or ())
    hint = str(trailers.get("retry-after-ms", ""))
    retry_after_s = int(hint) / 1000 if hint.isdecimal() else None
    return BatonError(error.code().name, error.details() or "no details", retry_after_s)
