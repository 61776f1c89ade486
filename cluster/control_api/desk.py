"""Both ends of a call without sockets: who may ask how much at once, and how answers and errors cross."""

import json
import logging
from collections import defaultdict
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, ConfigError, WireError
from cluster.control_api.messages import (
    ERROR_KINDS,
    FLEET_PLANE_VERSION,
    FROM_DOOR,
    TO_DOOR,
    Answer,
    Call,
    FleetConfiguration,
    Refusal,
    RefusalKind,
    Value,
    foreign_version,
)

logger = logging.getLogger(__name__)

MAX_CALLS_OF_ONE = 64
"""Under way over one connection. A gateway has a question for news, a report, and what operators ask of it."""
MAX_CALLS = 4096
"""Under way in all."""

_MAX_REASON = 4096
"""Characters."""

_OWN_SECTIONS = {"gateway", "logging"}


class Desk:
    """The door's end: which calls are under way, by connection. Each that is taken is answered or refused once."""

    def __init__(self) -> None:
        self.num_bad_messages = 0
        self._open: defaultdict[bytes, set[int]] = defaultdict(set)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        return self._num_open

    def take(self, peer: bytes, frames: list[bytes]) -> Call | bytes | None:
        """A call to carry out; or a frame to answer at once; or nothing, for what is no message of ours."""
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            call = TO_DOOR.decode(frames[0])
        except WireError as error:
            return self._refuse_bad(frames, error)
        numbers = self._open[peer]
        if call.number in numbers:
            self._note_bad(WireError(f"call {call.number} a second time"))
            return None
        if len(numbers) >= MAX_CALLS_OF_ONE or self._num_open >= MAX_CALLS:
            if not numbers:
                del self._open[peer]
            limit = f"{MAX_CALLS_OF_ONE} of one connection, {MAX_CALLS} in all"
            return _refusal(
                call.number, ClusterError(f"too many calls are under way ({limit}); ask again later")
            )
        numbers.add(call.number)
        self._num_open += 1
        return call

    def answer(self, peer: bytes, number: int, value: Value) -> bytes:
        """The frame that ends a call; says what is wrong if the value is too large for one."""
        self._close(peer, number)
        try:
            return FROM_DOOR.encode(Answer(number, value))
        except WireError as error:
            return _refusal(number, ClusterError(f"the answer cannot be sent: {error}"))

    def refuse(self, peer: bytes, number: int, error: BatonError) -> bytes:
        """The frame that ends a call with an error, which crosses with its type."""
        self._close(peer, number)
        return _refusal(number, error)

    def _close(self, peer: bytes, number: int) -> None:
        numbers = self._open[peer]
        numbers.remove(number)
        self._num_open -= 1
        if not numbers:
            del self._open[peer]

    def _refuse_bad(self, frames: list[bytes], error: WireError) -> bytes | None:
        self._note_bad(error)
        foreign = foreign_version(frames[0]) if len(frames) == 1 else None
        if foreign is None:
            return None
        version, number = foreign
        return _refusal(number, ClusterError(_versions(theirs=version)))

    def _note_bad(self, error: WireError) -> None:
        self.num_bad_messages += 1
        if self.num_bad_messages.bit_count() == 1:  # 1, 2, 4, 8, ...: who goes on must not fill the log
            logger.warning("dropped %d message(s) so far, the last one: %s", self.num_bad_messages, error)


def read_reply(frame: bytes) -> tuple[int, Value | BatonError]:
    """The caller's end: which call this answers, and what; an error is to be raised there. WireError if it is none."""
    try:
        reply = FROM_DOOR.decode(frame)
    except WireError:
        if (foreign := foreign_version(frame)) is None:
            raise
        version, number = foreign
        return number, ClusterError(_versions(theirs=version))
    if isinstance(reply, Answer):
        return reply.number, reply.value
    return reply.number, ERROR_KINDS[reply.kind](reply.message)


def pack_configuration(config: BatonConfig, model_path: Path) -> FleetConfiguration:
    sections = config.model_dump(mode="json", exclude_unset=True, exclude=_OWN_SECTIONS)
    return FleetConfiguration(json.dumps(sections), str(model_path))


def unpack_configuration(packed: FleetConfiguration) -> tuple[BatonConfig, Path]:
    """ConfigError if it is none that this version of Baton knows."""
    try:
        sections = json.loads(packed.sections)
    except ValueError as error:
        raise ConfigError(f"the fleet's configuration is no JSON: {error}") from error
    return BatonConfig.from_mapping(sections, "the fleet's configuration"), Path(packed.model_path)


def _refusal(number: int, error: BatonError) -> bytes:
    kinds = (kind for kind, error_type in ERROR_KINDS.items() if isinstance(error, error_type))
    message = str(error)[:_MAX_REASON].encode("utf-8", "replace").decode()  # a path in it may hold any bytes
    return FROM_DOOR.encode(Refusal(number, next(kinds, RefusalKind.CLUSTER_ERROR), message))


def _versions(theirs: int) -> str:
    return (
        f"the other end speaks version {theirs} of the fleet plane, this one {FLEET_PLANE_VERSION}; let both run the "
        "same version of Baton"
    )
