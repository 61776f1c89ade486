"""Output: stdout, whose failures `main` can tell from other errors."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any, cast


class OutputError(Exception):
    """Stdout cannot be written, for example because the disk is full. If the reader has left,
    BrokenPipeError is raised instead."""


class Output:
    """Writes to a text stream. All other attributes are the stream's."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _named_failures():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named_failures():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def checked_output() -> Iterator[None]:
    """If a write to stdout fails in the body, or the flush at the end, raises OutputError or BrokenPipeError.

    Stdout is flushed even after SystemExit.
    """
    with redirect_stdout(cast("IO[str]", Output(sys.stdout))):
        try:
            yield
        except SystemExit:  # after `--help` and `--version`
            sys.stdout.flush()
            raise
        sys.stdout.flush()


class LossyOutput(Output):
    """The output of a service: on a full disk, lines are lost, and the service continues."""

    def write(self, text: str) -> int:
        with suppress(OutputError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OutputError):
            super().flush()


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def replace_closed_streams() -> None:
    """Discards what is written to a stream that was closed (`>&-`). Python has None instead of such a stream, and the
    next file or socket would get its file descriptor."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def replace_unencodable() -> None:
    """Writes `?` for characters that the terminal's encoding lacks, such as an emoji of an answer in Latin-1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def discard_output() -> None:
    """Discards what stdout still holds. Otherwise Python would try to write it when the process ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
