"""Control calls <-> bytes: frames with a version and a number around the messages.

Carriers move the frames, and need not know the messages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.errors import BatonError, ClusterError, OtherFleetVersion, WireError
from baton.messages.control import CONTROL_PLANE_VERSION, CallFailure, ControlRequest, answer_type, check_time
from baton.messages.wire import Codec, unpack

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message. A description or a report of a thousand workers has some hundred kilobytes to a few
megabytes."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallFrame:
    """A request, as it is sent.

    Version and number come first in every version of this frame and of FailureFrame. So two ends of different
    versions can still report the difference.
    """

    version: int = field(default=CONTROL_PLANE_VERSION, kw_only=True)
    number: int
    """A new number for each call of a connection; the reply has the same number."""
    timeout_s: float
    """After this many seconds, no caller waits for the reply."""
    payload: bytes

    def __post_init__(self) -> None:
        _check_version(self.version)
        check_time("timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """The reply to a call that was carried out."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class FailureFrame:
    """The reply to a call that raised an error, or was refused."""

    version: int = field(default=CONTROL_PLANE_VERSION, kw_only=True)
    number: int
    failure: CallFailure

    def __post_init__(self) -> None:
        _check_version(self.version)


Reply = AnswerFrame | FailureFrame

_NAMES: dict[type, str] = {CallFrame: "Call", AnswerFrame: "Answer", FailureFrame: "Refusal"}
"""Names on the wire, which are the same in every version."""

CALL_FRAMES: Codec[CallFrame] = Codec(CallFrame, max_bytes=MAX_MESSAGE_BYTES, names=_NAMES)
REPLY_FRAMES: Codec[Reply] = Codec(AnswerFrame, FailureFrame, max_bytes=MAX_MESSAGE_BYTES, names=_NAMES)


class ControlCodec:
    """Encodes and decodes the messages of a closed set of calls, as the payload of frames."""

    def __init__(self, requests: Iterable[type[ControlRequest[Any]]]) -> None:
        kinds = tuple(requests)
        self.requests: Codec[ControlRequest[Any]] = Codec(*kinds, max_bytes=MAX_MESSAGE_BYTES)
        self._answers: dict[type, Codec[Any]] = {
            kind: Codec(answer_type(kind), max_bytes=MAX_MESSAGE_BYTES) for kind in kinds
        }

    def frame(self, number: int, timeout_s: float, request: ControlRequest[Any]) -> CallFrame:
        return CallFrame(number, timeout_s, self.requests.encode(request))

    def request_in(self, frame: CallFrame) -> ControlRequest[Any]:
        """The request in a frame. WireError if this end does not know the call, or its fields are wrong."""
        return self.requests.decode(frame.payload)

    def answer(self, number: int, request: ControlRequest[R], value: R) -> bytes:
        """The reply with this value. If the value is too large to be sent, the reply is an error."""
        try:
            return REPLY_FRAMES.encode(AnswerFrame(number, self._answers[type(request)].encode(value)))
        except WireError as error:
            return failure(number, ClusterError(f"the answer cannot be sent: {error}"))

    def value_in(self, reply: Reply, request: ControlRequest[R]) -> R:
        """The answer to the request; raises the error that arrived instead."""
        if isinstance(reply, FailureFrame):
            raise reply.failure.to_error()
        try:
            value: R = self._answers[type(request)].decode(reply.payload)
        except WireError as error:
            raise ClusterError(f"the answer to {type(request).__name__} cannot be read: {error}") from None
        return value

    def carry_out(self, frame: bytes, run: Callable[[ControlRequest[Any]], Any]) -> bytes:
        """The reply to one frame, even to an invalid frame. An error of `run` that is no BatonError is raised."""
        number = 0
        try:
            call = read_call(frame)
            number = call.number
            request = self.request_in(call)
            return self.answer(number, request, run(request))
        except BatonError as error:
            return failure(number, error)


def write_call(frame: CallFrame) -> bytes:
    """Encodes a call. WireError if the result is larger than the other end would accept."""
    return CALL_FRAMES.encode(frame)


def read_call(frame: bytes) -> CallFrame:
    """Decodes a call. WireError if the frame is no call."""
    return CALL_FRAMES.decode(frame)


def read_reply(frame: bytes) -> Reply:
    """A reply of another version becomes a failure that names the versions. WireError if the frame is no reply."""
    try:
        return REPLY_FRAMES.decode(frame)
    except WireError:
        if (foreign := foreign_version(frame)) is None:
            raise
        version, number = foreign
        return FailureFrame(number, CallFailure.of(versions_differ(version)))


def failure(number: int, error: BatonError) -> bytes:
    """The reply that ends a call with an error; see CallFailure."""
    return REPLY_FRAMES.encode(FailureFrame(number, CallFailure.of(error)))


def foreign_version(frame: bytes) -> tuple[int, int] | None:
    """Version and number of a frame that could not be decoded, if it is of another version than ours."""
    try:
        parts = unpack(frame)
    except WireError:
        return None
    if not isinstance(parts, list) or len(parts) < 3 or parts[0] not in ("Call", "Refusal"):
        return None
    version, number = parts[1:3]
    is_foreign = type(version) is int and type(number) is int and version != CONTROL_PLANE_VERSION
    return (version, number) if is_foreign else None


def versions_differ(theirs: int) -> OtherFleetVersion:
    return OtherFleetVersion(
        f"the other process speaks version {theirs} of the control plane, this process version "
        f"{CONTROL_PLANE_VERSION}; run the same version of Baton everywhere, and restart the processes that still run "
        "another version"
    )


def _check_version(version: int) -> None:
    if version != CONTROL_PLANE_VERSION:
        raise WireError(
            f"version {version} of the control plane, ours is {CONTROL_PLANE_VERSION}; run the same version of Baton "
            "on both"
        )
