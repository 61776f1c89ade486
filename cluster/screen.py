"""What a person sees while a command works: a line per stage, spinner or bar on a terminal; knows no cluster."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_LABEL_WIDTH = 9


class Screen:
    """Writes to one console. Away from a terminal the same lines come out plain, without anything that moves."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, label: str, text: str) -> None:
        self.console.print(f"[bold]{label:<{_LABEL_WIDTH}}[/] {text}", highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, label: str, doing: str) -> Iterator[Callable[[str], None]]:
        """Shows `doing` while the body runs; the body says through the yielded function what came of it."""
        started = time.monotonic()
        outcome = [doing]
        with self.console.status(f"{label:<{_LABEL_WIDTH}} {doing} ..."):
            yield outcome.append
        self.line(label, f"{outcome[-1]} [dim]{time.monotonic() - started:.1f} s[/]")

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, float], None]]:
        """A progress bar that appears with the first report; plain lines, one per new text, elsewhere."""
        if not self.console.is_terminal:
            yield _each_text_once(lambda text: self.line("", text))
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            tasks: dict[str, TaskID] = {}

            def report(text: str, fraction: float) -> None:
                what = text.partition(":")[0]
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=1.0)
                progress.update(tasks[what], completed=fraction, description=text)

            yield report


def _each_text_once(write: Callable[[str], None]) -> Callable[[str, float], None]:
    last = ""

    def report(text: str, _fraction: float) -> None:
        nonlocal last
        if text != last:
            last = text
            write(text)

    return report
