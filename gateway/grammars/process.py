"""CompileProcess: the gateway's end of the process that compiles grammars (engine/grammars/process.py)."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.errors import WireError
from baton.messages.grammar_check import HEADER_BYTES, Message, TryGrammar, pack, unpack
from baton.system.module_command import module_command
from gateway.model import ServedModel

STOP_TIMEOUT_S = 2.0

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables with which libraries start no threads in the process. The process forks, and in a fork only the
thread that forked continues to run."""


class CompileProcess:
    """One process from its start to its end. Use it from one event loop only."""

    def __init__(
        self, arguments: list[str], on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        """`on_message` receives every message of the process; `on_end` is called once, when the process has ended."""
        self._command = module_command("engine.grammars.process", *arguments)
        self._on_message = on_message
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process. Raises OSError if this fails."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**_kept(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ONE_THREAD},
            start_new_session=True,  # so that it and its forks can be killed together
        )
        self._reading = asyncio.create_task(self._read())

    @property
    def is_running(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def send(self, message: TryGrammar) -> None:
        """Returns once the message is written. If the process has ended, drops the message silently."""
        assert self._process is not None, "the process was not started"
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(pack(message))
            await self._process.stdin.drain()

    def kill(self) -> None:
        """Kills the process and its forks, in any state."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ends the process, and waits for its end. `on_end` is called, as after every end of the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while True:
                header = await self._process.stdout.readexactly(HEADER_BYTES)
                data = await self._process.stdout.readexactly(int.from_bytes(header, "big"))
                self._on_message(unpack(data))
        except (asyncio.IncompleteReadError, WireError):
            self.kill()  # end of its pipe, or invalid output
        finally:
            self._on_end()


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that an interpreter may need to start. Secrets are left out."""
    return {name: environment[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in environment}


def process_arguments(model_folder: Path, model: ServedModel) -> list[str]:
    """The arguments of the process's command, for a model's own tokenizer."""
    eos_token_ids = ",".join(map(str, model.eos_token_ids))
    return [str(model_folder / "tokenizer.json"), str(model.vocab_size), eos_token_ids]
