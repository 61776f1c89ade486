"""A client of Baton's gRPC API for applications: one file to copy, on `grpcio` and the generated package `baton.v1`.

    from baton_client import BatonClient

    async with BatonClient("10.0.0.1:50051", "10.0.0.2:50051", api_key=key) as client:
        async for part in client.generate(messages=[("user", "Why is the sky blue?")], max_tokens=200):
            print(part.text, end="")

Give it every gateway of a fleet: requests take turns, and go on elsewhere when a gateway does not answer or dies.

What is tried again, and what is not:

* UNAVAILABLE (no gateway there, it died, no worker there) and RESOURCE_EXHAUSTED (no room) are,
  `Retry.attempts` times in all, with waits that double. A gateway's own hint (`retry-after-ms`) counts if it is
  longer. All else is raised as it is.
* Tokens never come twice. A stream that breaks half-way is asked for anew from its beginning: the answer to a
  request is a pure function of its seed (one is drawn where none is given), so another gateway's answer begins
  with the same tokens, which are compared and left out. If they differ, as after an update of the model, that
  is an error: DATA_LOSS.
* `timeout_s` is for everything together. Leaving the loop, or cancelling its task, ends the request on the
  workers too.
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
    # Or a gateway that comes back after a while is not found again for up to two minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A gateway whose machine is gone closes no connection. The gateway allows a ping every ten seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_FREE_NAME_TIMEOUT_S = 2.0
_MODES = {
    None: pb.ROUTING_MODE_UNSPECIFIED,
    "disaggregated": pb.ROUTING_MODE_DISAGGREGATED,
    "local": pb.ROUTING_MODE_LOCAL,
}


class BatonError(Exception):
    """The service refused, or no gateway could be reached. `code` is gRPC's status by name: INVALID_ARGUMENT."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        """When the service thinks that the same request may succeed."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When to try again. `attempts=1`: never."""

    attempts: int = 5
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    may_resume: bool = True
    """Also after the first token, as described above. Else a stream that breaks half-way raises what broke it."""

    def wait_s(self, failed: int, hint_s: float | None, rng: random.Random) -> float:
        """After so many attempts that failed: doubled each time, and less at random, so that clients part company."""
        backoff_s = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failed - 1))
        return max(backoff_s * rng.uniform(0.5, 1.0), hint_s or 0.0)


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files' contents. `certificate` and `key` are this client's own, where the gateway asks for one (mTLS)."""

    authorities: bytes | None = None
    """None: those that gRPC brings along."""
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class Sampling(TypedDict, total=False):
    """See SamplingParams in sampling.proto for what each is, and its default."""

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
    """How an answer ended, and what it took. The last attempt's, if there was more than one."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in a prefix cache."""
    ttft_s: float
    total_s: float
    prefill_worker: str
    """Empty if the decode worker computed the prompt by itself."""
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Part:
    """News of an answer. Text may lag behind tokens: characters and stop strings may span several of them."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None
    """In the last one only."""
    events: tuple[pb.AnswerEvent, ...] = ()
    """What the text says, reasoning and calls of tools too; only if `chat` has tools or `events`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


class BatonClient:
    """An async context manager around a channel to each of `targets` (HOST:PORT). Any number of requests at once."""

    def __init__(
        self,
        *targets: str,
        api_key: str | None = None,
        tls: TLS | None = None,
        retry: Retry | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`rng` draws seeds and waits. Without `tls`, everything travels in the clear, the key too."""
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
        """Ends what is still under way."""
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
        """Streams an answer; exactly one of `text`, `token_ids`, `messages` (role, content) and `chat` is the prompt.

        `request_id` is for `abort`. Raises BatonError.
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
        """Whether some gateway had such a request, which has ended now."""
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
        """From the first gateway that answers."""
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
        stub: "pb_grpc.GenerationServiceAsyncStub",  # a name for type checkers alone
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
        """A gateway may not know yet that the connection of an earlier attempt is gone, and keep it for running."""
        request = pb.AbortRequest(request_ids=[request_id])
        with suppress(grpc.aio.AioRpcError):
            await stub.Abort(request, timeout=_FREE_NAME_TIMEOUT_S, metadata=self._metadata)

    async def _wait_or_raise(
        self, error: BatonError, failed: int, answer: "_Answer", deadline: float | None
    ) -> None:
        is_final = failed >= self._retry.attempts or (answer.token_ids and not self._retry.may_resume)
        if is_final or not _may_pass(error):
            raise error
        if error.code == "UNAVAILABLE" and failed % len(self._stubs):
            return  # this gateway is not there, but there is another one
        wait_s = self._retry.wait_s(failed, error.retry_after_s, self._rng)
        if deadline is not None and time.monotonic() + wait_s >= deadline:
            raise error
        await asyncio.sleep(wait_s)


class _Answer:
    """What the caller has of an answer, and the progress of the current attempt."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.is_over = False
        self.has_begun = False
        self._num_tokens = 0
        self._num_characters = 0
        self._num_units = 0
        self._num_known_units = 0
        """Of events: the characters of pieces, and 1 for every other event."""

    def begin(self) -> None:
        """Another attempt, which repeats the answer from the beginning."""
        self.has_begun = True
        self._num_tokens = self._num_characters = self._num_units = 0

    def take(self, response: pb.GenerateResponse) -> Part | None:
        """What is new in it; None if nothing is. BatonError if it contradicts what the caller has."""
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
        """A retry may cut pieces otherwise, so the caller may have the beginning of one. It was the same tokens'."""
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
    """How much of a piece of this size, at this position, is no news."""
    return max(0, min(size, num_known - position))


def _channel(target: str, tls: TLS | None) -> grpc.aio.Channel:
    # Or gRPC asks the proxy that http_proxy names for a gateway on this machine.
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
    """Without a hint, what is exhausted is the size that a message may have."""
    is_overloaded = error.code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None
    return error.code == "UNAVAILABLE" or is_overloaded


def _error_of(error: grpc.aio.AioRpcError) -> BatonError:
    trailers = dict(error.trailing_metadata() or ())
    hint = str(trailers.get("retry-after-ms", ""))
    retry_after_s = int(hint) / 1000 if hint.isdecimal() else None
    return BatonError(error.code().name, error.details() or "no details", retry_after_s)
