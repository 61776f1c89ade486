"""A process that answers orders, one line of JSON each, and a handle for the process that sends them."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Order = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "answer: "
"""The prefix of lines that are answers. Libraries print other lines."""
ANSWER_TIMEOUT_S = 120.0
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


def serve(answer: Callable[[Order], Order]) -> None:
    """Answers orders until standard input ends. Orders and answers are one line of JSON each."""
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(json.loads(line))), flush=True)


class Peer:
    """A process `python -m module arguments` that runs until the end of the `with` block."""

    def __init__(
        self, python: str, module: str, arguments: Sequence[str] = (), timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """`timeout_s` limits the wait for each answer. The first wait includes the start of the process."""
        self._name = " ".join((python, "-m", module, *arguments))
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | QUIET,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, order: Order) -> Any:
        """Sends one order, and returns the answer. Raises RuntimeError if no answer arrives in time."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(self._timeout_s, process.kill)
        deadline.start()
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        except BrokenPipeError:
            pass  # the process has ended; reported below
        finally:
            deadline.cancel()
        raise RuntimeError(
            f"{self._name} ended, or was ended after {self._timeout_s:.0f} s, without an answer to "
            f"{str(order)[:200]}; what it wrote to standard error is above"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Kills all its children, too: vLLM's would outlive the process, and keep its standard output open.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
