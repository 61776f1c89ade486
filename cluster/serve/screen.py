"""The output of a running command: a line per stage, and a spinner or bar on a terminal; knows no cluster.

Texts are printed as they are: addresses and paths may contain brackets, which rich would take for styles.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from baton.system.cpus import cpus_text
from baton.system.paced import paced
from baton.worker import StartProgress, WorkerEndpoint

_LABEL_WIDTH = 9
_BAR_WIDTH = 30


class Screen:
    """Writes to one console. Without a terminal, the same lines are plain text without moving parts."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, label: str, text: str | Text) -> None:
        line = Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), " ", text)
        self.console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, label: str, doing: str) -> Iterator["ScreenStage"]:
        """Shows `doing` while the body runs; the body calls the yielded stage with the outcome."""
        started = time.monotonic()
        with self.console.status(f"{label:<{_LABEL_WIDTH}} {escape(doing)} ...") as status:
            stage = ScreenStage(status, doing, lambda text: self.line("", text))
            yield stage
        took = (f"{time.monotonic() - started:.1f} s", "dim")
        self.line(label, Text.assemble(stage.outcome, " ", took))

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, float], None]]:
        """A progress bar that appears with the first report; without a terminal, a line every few seconds."""
        if not self.console.is_terminal:
            yield paced(lambda text: self.line("", text))
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            tasks: dict[str, TaskID] = {}

            def report(text: str, fraction: float) -> None:
                what = text.partition(":")[0]
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=1.0)
                progress.update(tasks[what], completed=fraction, description=text)

            yield report


class ScreenStage:
    """One stage: its text, the bars of its parts on a terminal, and its outcome."""

    def __init__(self, status: Status, doing: str, write: Callable[[str], None]) -> None:
        self.outcome = doing
        self._write = write
        self._status = status
        self._doing = status.status
        self._parts: dict[str, StartProgress] = {}

    def __call__(self, outcome: str) -> None:
        self.outcome = outcome

    def say(self, status_text: str) -> None:
        """Shows a status beside the stage's text, on a terminal only; a new status replaces the last."""
        self._status.update(f"{self._doing} [dim]({escape(status_text)})[/]")

    def note(self, text: str) -> None:
        """Prints a permanent line."""
        self._write(text)

    def report(self, part: str, progress: StartProgress) -> None:
        """Shows the progress of a part, instead of the part's former progress."""
        self._parts[part] = progress
        table = Table.grid(padding=(0, 2))
        for name, latest in sorted(self._parts.items()):
            done = latest.done / latest.count
            bar = ProgressBar(total=1.0, completed=done, width=_BAR_WIDTH)
            table.add_row(" " * _LABEL_WIDTH, Text(name), Text(latest.what), bar, f"{done:4.0%}")
        self._status.update(Group(self._doing, table))


def workers_text(endpoints: Iterable[WorkerEndpoint]) -> str:
    return ", ".join(
        f"{e.ref.name} ({e.role.value}, pid {e.pid}{_cores_text(e)}{_weights_text(e)})" for e in endpoints
    )


def _weights_text(endpoint: WorkerEndpoint) -> str:
    """How the worker stores its weights; empty if in the model's data type."""
    return f", {endpoint.quantization} weights" if endpoint.quantization else ""


def _cores_text(endpoint: WorkerEndpoint) -> str:
    """The threads and CPUs of a worker that computes on a CPU; empty on a GPU."""
    if not endpoint.num_threads:
        return ""
    threads = f", {endpoint.num_threads} thread{'s' if endpoint.num_threads > 1 else ''}"
    return f"{threads} on CPUs {cpus_text(endpoint.cpus)}" if endpoint.cpus else threads
