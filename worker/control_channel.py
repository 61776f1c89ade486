"""The control plane of a worker that is a child process: lines of JSON, questions to stdin, answers from stdout.

    -> {"do":"drain","id":1,"timeout_s":5.0}                        running requests get so long; see EngineHost.drain
    <- {"answer":"drained","id":1,"is_clean":true}
    -> {"do":"set_role","id":2,"role":"decode","timeout_s":5.0}     see EngineHost.set_role
    <- {"answer":"role_set","id":2}
    -> {"do":"status","id":3}
    <- {"answer":"status","id":3,"status":{...}}                    a WorkerStatus
    <- {"answer":"failed","id":2,"kind":"FleetError","message":"..."}

Every question is answered once, when it is done, so answers may overtake one another. What is no question is answered,
too, as "failed" with the kind "WireError", and with the id null if it has none that can be read.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from baton.errors import BatonError, ClusterError, FleetError, WireError
from baton.worker import WorkerRole, WorkerStatus

MAX_LINE_BYTES = 64 * 1024
"""Of a question."""

MAX_QUESTIONS = 16
"""That may be open at a time; one more is answered with an error."""

_STRICT = ConfigDict(extra="forbid", strict=True)

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Drain:
    """Give away what you have, for good."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    timeout_s: Seconds
    do: Literal["drain"] = field(default="drain", kw_only=True)


@dataclass(frozen=True, slots=True)
class SetRole:
    """Serve in this role."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    role: WorkerRole
    timeout_s: Seconds
    do: Literal["set_role"] = field(default="set_role", kw_only=True)


@dataclass(frozen=True, slots=True)
class GetStatus:
    """How do you stand?"""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    do: Literal["status"] = field(default="status", kw_only=True)


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left, and if `is_clean`, nobody lost anything."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    is_clean: bool
    answer: Literal["drained"] = field(default="drained", kw_only=True)


@dataclass(frozen=True, slots=True)
class RoleSet:
    """The worker serves in that role."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    answer: Literal["role_set"] = field(default="role_set", kw_only=True)


@dataclass(frozen=True, slots=True)
class StatusIs:
    """So it stands."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int
    status: WorkerStatus
    answer: Literal["status"] = field(default="status", kw_only=True)


@dataclass(frozen=True, slots=True)
class Failed:
    """It did not work."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    id: int | None
    kind: str
    """The name of an exception of baton/errors.py."""
    message: str
    answer: Literal["failed"] = field(default="failed", kw_only=True)


Question = Drain | SetRole | GetStatus
Answer = Drained | RoleSet | StatusIs | Failed
A = TypeVar("A", Drained, RoleSet, StatusIs)

_QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="do")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answer")])


class Controlled(Protocol):
    """The worker: EngineHost. Its calls may block, and raise BatonErrors."""

    def drain(self, timeout_s: float) -> bool: ...

    def set_role(self, role: WorkerRole, timeout_s: float) -> None: ...

    def status(self) -> WorkerStatus: ...


class ControlServer:
    """The worker's end. Each question gets a thread, so that a long one keeps nobody else waiting."""

    def __init__(self, worker: Controlled, write: Callable[[str], None]) -> None:
        """`write` sends one line; it is never called from two threads at once."""
        self._worker = worker
        self._write = write
        self._lock = threading.Lock()
        self._buffer = b""
        self._slots = threading.BoundedSemaphore(MAX_QUESTIONS)

    def take(self, data: bytes) -> None:
        """Bytes of stdin, as they come."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._begin(line)
        if len(self._buffer) > MAX_LINE_BYTES:
            self._say(Failed(None, WireError.__name__, f"a line of more than {MAX_LINE_BYTES} bytes"))
            self._buffer = b""

    def _begin(self, line: bytes) -> None:
        try:
            question = _QUESTION.validate_json(line)
        except ValidationError as error:
            self._say(Failed(_id_in(line), WireError.__name__, f"not a question: {_brief(error)}"))
            return
        if not self._slots.acquire(blocking=False):
            message = f"{MAX_QUESTIONS} questions wait for an answer already"
            self._say(Failed(question.id, FleetError.__name__, message))
            return
        threading.Thread(target=self._answer, args=(question,), name="control", daemon=True).start()

    def _answer(self, question: Question) -> None:
        try:
            self._say(self._do(question))
        except Exception as error:  # the edge of the thread: whoever asked must not wait for ever
            kind = type(error) if isinstance(error, BatonError) else ClusterError
            self._say(Failed(question.id, kind.__name__, str(error) or type(error).__name__))
        finally:
            self._slots.release()

    def _do(self, question: Question) -> Answer:
        match question:
            case Drain(id, timeout_s):
                return Drained(id, self._worker.drain(timeout_s))
            case SetRole(id, role, timeout_s):
                self._worker.set_role(role, timeout_s)
                return RoleSet(id)
            case GetStatus(id):
                return StatusIs(id, self._worker.status())

    def _say(self, answer: Answer) -> None:
        with self._lock:
            self._write(_ANSWER.dump_json(answer).decode())


class ControlChannel:
    """The other end, for whoever started the worker and has read its endpoint. Calls wait for as long as the worker
    needs; they raise FleetError if it says no, and ClusterError as soon as it is gone.
    """

    def __init__(self, name: str, stdin: IO[str], stdout: IO[str]) -> None:
        """Both belong to the channel from now on; it closes `stdout` when the worker does."""
        self._name = name
        self._stdin = stdin
        self._stdout = stdout
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Future[Answer]] = {}
        self._is_gone = False
        self._reader = threading.Thread(target=self._read, name=f"control {name}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Lets the worker end by itself: it is told by the end of its stdin. May be repeated."""
        with self._lock, contextlib.suppress(OSError):  # what was not written before it died
            self._stdin.close()

    async def drain(self, timeout_s: float) -> bool:
        """Whether nobody lost anything; see EngineHost."""
        return (await self._ask(lambda number: Drain(number, timeout_s), Drained)).is_clean

    async def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        """Returns once it serves in this role; see EngineHost."""
        await self._ask(lambda number: SetRole(number, role, timeout_s), RoleSet)

    async def status(self) -> WorkerStatus:
        return (await self._ask(GetStatus, StatusIs)).status

    async def _ask(self, make: Callable[[int], Question], kind: type[A]) -> A:
        answer = await asyncio.wrap_future(self._send(make))
        if isinstance(answer, Failed):
            error_class = FleetError if answer.kind == FleetError.__name__ else ClusterError
            raise error_class(answer.message)
        if not isinstance(answer, kind):
            raise ClusterError(f"worker {self._name} gave an answer to another question: {answer.answer}")
        return answer

    def _send(self, make: Callable[[int], Question]) -> Future[Answer]:
        """On any thread: what is written is short, and the worker reads at once."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._is_gone:
                raise self._loss()
            question = make(next(self._ids))
            self._open[question.id] = future
            try:
                self._stdin.write(_QUESTION.dump_json(question).decode() + "\n")
                self._stdin.flush()
            except (OSError, ValueError):  # a broken pipe; closed by ourselves
                del self._open[question.id]
                raise self._loss() from None
        return future

    def _read(self) -> None:
        with self._stdout:
            for line in self._stdout:
                self._take(line)
        with self._lock:
            self._is_gone = True
            left, self._open = list(self._open.values()), {}
        for future in left:
            _resolve(future, self._loss())

    def _take(self, line: str) -> None:
        """What cannot be read is an answer to nobody; whoever waits for it hears when the worker ends."""
        try:
            answer = _ANSWER.validate_json(line)
        except ValidationError:
            return
        with self._lock:
            future = self._open.pop(answer.id, None) if answer.id is not None else None
        if future is not None:
            _resolve(future, answer)

    def _loss(self) -> ClusterError:
        return ClusterError("its process has ended")


def _resolve(future: Future[Answer], outcome: Answer | ClusterError) -> None:
    if not future.set_running_or_notify_cancel():
        return  # whoever asked waits no longer
    if isinstance(outcome, ClusterError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _id_in(line: bytes) -> int | None:
    try:
        values: Any = json.loads(line)
    except ValueError:
        return None
    number = values.get("id") if isinstance(values, dict) else None
    return number if type(number) is int else None


def _brief(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
