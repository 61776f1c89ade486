"""A process that executes commands (see `benchmarks/scheduler_rounds.py`), as its commander sees it."""

import json
import os
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.scheduler_rounds import ANSWER

ROOT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 120.0


class Peer:
    """`python -m module`, alive until the end of the `with` block."""

    def __init__(self, python: str, module: str) -> None:
        self._name = f"{python} -m {module}"
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> Any:
        """The answer to one order; RuntimeError if none comes in time."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(ANSWER_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        except BrokenPipeError:
            pass  # it ended; said below
        finally:
            deadline.cancel()
        raise RuntimeError(
            f"{self._name} ended, or was ended after {ANSWER_TIMEOUT_S:.0f} s, without an answer to "
            f"{str(order)[:200]}; what it wrote to standard error is above"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
