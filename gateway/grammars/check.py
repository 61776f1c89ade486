"""GrammarCheck: compiles every grammar in a separate process, which may crash, before a worker gets it.

    known text         gets its earlier verdict at once
    too deep           is refused before it is compiled
    everything else    is compiled, one text at a time; callers share this time fairly

A text that ended the process, or took too much CPU time, is refused from then on. The latest verdicts are kept.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from baton.clock import Clock
from baton.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestError
from baton.messages.grammar_check import (
    CPU_LIMIT_S,
    FOLLOW_LIMIT_S,
    MEMORY_LIMIT_BYTES,
    STACK_BYTES,
    GrammarEndedProcess,
    GrammarTried,
    Message,
    TryGrammar,
)
from baton.sampling import StructuredOutput
from baton.system.tasks import end_tasks
from baton.system.turns import FairTurns
from gateway.grammars.depth import check_depth
from gateway.grammars.process import CompileProcess

logger = logging.getLogger(__name__)

VERDICTS = ("compiled", "invalid", "killed", "known")
MAX_VERDICT_BYTES = 4 * 2**20
"""Limit for the bytes of all verdicts. There is room for about 20,000 verdicts, or 5,000 with reasons of average
length."""
VERDICT_OVERHEAD_BYTES = 200
"""The bytes of a verdict's key and of its entry in the dictionary."""
MAX_INLINE_CHARACTERS = 5_000
"""The depth of a longer text is determined on a thread."""
MAX_WAIT_S = 30.0
TRY_TIMEOUT_S = 30.0
"""The longest time to compile one grammar. It exceeds CPU_LIMIT_S, the limit of CPU time, since the machine may be
busy."""
RETRY_AFTER_S = 1.0

FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM})
"""Signals from the system or an operator. A process that exceeds one of its own limits gets another signal."""


@dataclass(eq=False, slots=True)
class GrammarTrial:
    """A grammar that waits to be compiled."""

    number: int
    """Trials are numbered in the order in which they join."""
    caller: str
    output: StructuredOutput
    digest: bytes
    """The key under which the verdict is kept."""
    verdict: "asyncio.Future[RequestError | None]"
    """None: the grammar compiles. InvalidRequest: it does not. Overloaded: the result is unknown."""


class GrammarCheck:
    """Use it from one event loop only. Its process starts at the first grammar, or at `warm_up`."""

    def __init__(
        self,
        make_process: Callable[[Callable[[Message], None], Callable[[], None]], CompileProcess],
        clock: Clock,
        max_waiting: int,
        on_verdict: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_verdict` receives one of VERDICTS for every grammar that was checked; `killed` may follow `compiled`."""
        self._make_process = make_process
        self._clock = clock
        self._max_waiting = max_waiting
        self._on_verdict = on_verdict
        self._process: CompileProcess | None = None
        self._verdicts: dict[bytes, str | None] = {}
        """By digest: why the text is refused, or None if it compiles. The latest used entry is last."""
        self._verdict_bytes = 0
        self._queue = FairTurns[str, GrammarTrial]()
        self._number = 0
        self._sent: deque[GrammarTrial] = deque(maxlen=2)
        """The latest grammars sent to the process. A grammar may still end its fork after the fork reported
        success."""
        self._running: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_stopped = False

    async def check(self, output: StructuredOutput, caller: str, deadline: float | None) -> None:
        """Returns if the grammar compiles. Raises InvalidRequest if it does not.

        Raises Overloaded if too many grammars wait, and DeadlinePassed at the request's `deadline`, on the event loop's
        clock.
        """
        error: RequestError | None
        if (digest := digest_of(output)) in self._verdicts:
            self._on_verdict("known")
            error = self._known_verdict(digest)
        else:
            if len(output.source) <= MAX_INLINE_CHARACTERS:
                check_depth(output)
            else:
                await asyncio.to_thread(check_depth, output)
            error = await self._queued_verdict(output, digest, caller, deadline)
        if error is not None:
            raise error

    async def warm_up(self) -> None:
        """Starts the process, so that the first grammar does not wait for it. If the start fails, the first grammar
        starts the process."""
        with contextlib.suppress(OSError):
            await self._running_process()

    async def stop(self) -> None:
        """Refuses all waiting grammars."""
        self._is_stopped = True
        if self._running is not None:
            await end_tasks(self._running)
        while (turn := self._queue.take_next()) is not None:
            self._give_up(turn[1], "this gateway is stopping")
        if self._process is not None:
            await self._process.stop()

    async def _queued_verdict(
        self, output: StructuredOutput, digest: bytes, caller: str, deadline: float | None
    ) -> RequestError | None:
        trial = self._add(output, digest, caller)
        waits_until = asyncio.get_running_loop().time() + MAX_WAIT_S
        if deadline is not None:
            waits_until = min(deadline, waits_until)
        try:
            async with asyncio.timeout_at(waits_until):
                return await asyncio.shield(trial.verdict)
        except TimeoutError:
            if waits_until == deadline:
                raise DeadlinePassed(
                    "the request's deadline passed before its grammar was compiled"
                ) from None
            raise Overloaded(
                f"the grammar was not compiled within {MAX_WAIT_S:g} s; {len(self._queue)} grammars wait",
                RETRY_AFTER_S,
            ) from None
        finally:
            self._queue.discard(caller, trial)

    def _add(self, output: StructuredOutput, digest: bytes, caller: str) -> GrammarTrial:
        """Queues a grammar. If too many grammars wait then, refuses one grammar of the caller that has the most waiting
        ones."""
        if self._is_stopped:
            raise Overloaded("this gateway is stopping", RETRY_AFTER_S)
        self._number += 1
        verdict = asyncio.get_running_loop().create_future()
        trial = GrammarTrial(self._number, caller, output, digest, verdict)
        self._queue.add(caller, trial)
        if len(self._queue) > self._max_waiting and (last := self._queue.last_of_largest()) is not None:
            self._queue.discard(*last)
            limit = f"{self._max_waiting} grammars are waiting to be compiled, which is the limit"
            self._give_up(last[1], limit)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return trial

    async def _run(self) -> None:
        """Takes one grammar after another, checks it and reports the result, until no grammar waits."""
        while (turn := self._queue.take_next()) is not None:
            caller, trial = turn
            if trial.digest in self._verdicts:  # another grammar had the same text
                trial.verdict.set_result(self._known_verdict(trial.digest))
                continue
            began = self._clock.now()
            await self._try(trial)
            self._queue.charge(caller, self._clock.now() - began)

    async def _try(self, trial: GrammarTrial) -> None:
        try:
            process = await self._running_process()
        except OSError as error:
            logger.error("cannot start the process that compiles grammars: %s", error)
            self._give_up(trial, "grammars cannot be compiled at present")
            return
        self._sent.append(trial)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRY_TIMEOUT_S):  # a process that was stopped does not even read
                await process.send(TryGrammar(trial.number, trial.output))
                await asyncio.wait([trial.verdict])
        if not trial.verdict.done():
            self._give_up(trial, f"the grammar could not be compiled within {TRY_TIMEOUT_S:g} s")
            process.kill()

    async def _running_process(self) -> CompileProcess:
        async with self._starting:
            if self._process is None or not self._process.is_running:
                self._process = self._make_process(self._on_message, self._on_process_ended)
                await self._process.start()
            return self._process

    def _on_message(self, message: Message) -> None:
        trial = next((trial for trial in self._sent if trial.number == message.number), None)
        if trial is None:
            return  # the grammar was given up long ago
        match message:
            case GrammarTried(error=error):
                self._conclude(trial, error, "compiled" if error is None else "invalid")
            case GrammarEndedProcess(signal=number) if number in FROM_OUTSIDE:
                self._give_up(trial, "the process that compiled the grammar was killed; try again")
            case GrammarEndedProcess(signal=number):
                logger.warning(
                    "a grammar of caller '%s' with %d characters ended its compiler with signal %d; "
                    "refusing it from now on",
                    trial.caller,
                    len(trial.output.source),
                    number,
                )
                self._conclude(trial, _reason(number), "killed")

    def _conclude(self, trial: GrammarTrial, error: str | None, result: str) -> None:
        """Stores a verdict. If a grammar ends its process after a success, its new verdict replaces the old
        one."""
        if trial.digest in self._verdicts:
            self._verdict_bytes -= _verdict_bytes(self._verdicts.pop(trial.digest))
        self._verdicts[trial.digest] = error
        self._verdict_bytes += _verdict_bytes(error)
        while self._verdict_bytes > MAX_VERDICT_BYTES:
            self._verdict_bytes -= _verdict_bytes(self._verdicts.pop(next(iter(self._verdicts))))
        self._on_verdict(result)
        if not trial.verdict.done():
            trial.verdict.set_result(self._known_verdict(trial.digest))

    def _on_process_ended(self) -> None:
        """The process itself ended. No grammar can cause this, since forks compile the grammars."""
        for trial in self._sent:
            self._give_up(trial, "the process that compiles grammars ended; try again")
        if not self._is_stopped:
            logger.error("the process that compiles grammars ended; the next grammar restarts it")

    def _give_up(self, trial: GrammarTrial, reason: str) -> None:
        if not trial.verdict.done():
            trial.verdict.set_result(Overloaded(reason, RETRY_AFTER_S))

    def _known_verdict(self, digest: bytes) -> InvalidRequest | None:
        error = self._verdicts.pop(digest)
        self._verdicts[digest] = error  # most recently used
        return None if error is None else InvalidRequest("structured_output", error)


def digest_of(output: StructuredOutput) -> bytes:
    """The key under which a text's verdict is kept."""
    return blake2b(
        f"{output.kind.value}\n{output.source}".encode(errors="surrogatepass"), digest_size=16
    ).digest()


def _verdict_bytes(error: str | None) -> int:
    return VERDICT_OVERHEAD_BYTES + (sys.getsizeof(error) if error is not None else 0)


def _reason(number: int) -> str:
    if number == signal.SIGPROF:
        return (
            f"the grammar is too complex: compiling it takes more than {CPU_LIMIT_S:g} s, or matching its "
            f"first tokens more than {FOLLOW_LIMIT_S:g} s"
        )
    return (
        f"the grammar is too complex: compiling it takes more than {STACK_BYTES >> 20} MiB of stack "
        f"or {MEMORY_LIMIT_BYTES >> 20} MiB of memory"
    )
