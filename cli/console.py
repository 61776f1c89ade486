"""The consoles that commands print to."""

import sys
from typing import IO, cast

from rich.console import Console

from cli.output import LossyOutput

WIDTH_OF_FILES = 160
"""Width of a picture or table in columns if stdout is not a terminal."""


class CommandConsole(Console):
    """rich's console, for commands whose exit codes `main` chooses."""

    def on_broken_pipe(self) -> None:
        """Leaves the error to `main`. rich would end the process with exit code 1."""
        self.quiet = True  # nothing is printed while the command ends
        raise BrokenPipeError


def service_console() -> CommandConsole:
    """A console on stderr for a command that serves."""
    return CommandConsole(file=cast("IO[str]", LossyOutput(sys.stderr)))


def wide_console() -> CommandConsole:
    """A console on stdout for tables and pictures."""
    console = CommandConsole()
    return console if console.is_terminal else CommandConsole(width=WIDTH_OF_FILES)
