"""download: downloads a large file of the Hub; continues where an earlier process stopped; checks the sha256.

huggingface_hub itself would delete a partial file. The finished file has the name that huggingface_hub's cache
expects, so huggingface_hub finds it.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # exported lazily

from baton.errors import ModelError

MAX_FRUITLESS = 5
"""The download fails after this many tries in a row without a new byte."""
FIRST_PAUSE_S = 0.5
"""Pause after the first try without a new byte; each following pause is twice as long."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file that the Hub stores under the hash of its content."""

    url: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):  # used as a file's name
            raise ModelError(
                f"{self.url}: the Hub gives {self.sha256!r:.80} as its sha256, which is not valid"
            )


class Stopped(Exception):
    """Another file's download failed, or the user ended the command."""


def partial_of(file: LargeFile, folder: Path) -> Path:
    return folder / f"{file.sha256}.incomplete"


def bytes_there(file: LargeFile, folder: Path) -> int:
    """How many bytes of the file are there from earlier downloads."""
    for path in (folder / file.sha256, partial_of(file, folder)):
        if path.exists():
            return path.stat().st_size
    return 0


def download(
    file: LargeFile, folder: Path, on_position: Callable[[int], None], stop: threading.Event
) -> None:
    """Completes `folder/SHA256`. The caller must exclude other writers.

    After a broken connection, or an answer of another size, it tries again. If MAX_FRUITLESS tries in a row bring no
    new byte, it raises the last error. It raises Stopped soon after `stop` is set. In both cases the partial file stays
    for the next call. If the sha256 is wrong, it deletes the file and raises ModelError.
    """
    target, partial = folder / file.sha256, partial_of(file, folder)
    if target.exists():
        return
    partial.touch()
    num_fruitless = 0
    position = partial.stat().st_size
    largest = position if position <= file.size_bytes else 0
    while position != file.size_bytes:
        if stop.is_set():
            raise Stopped
        if position > file.size_bytes:
            os.truncate(partial, 0)
        failure = _try(file, partial, on_position, stop)
        position = partial.stat().st_size
        if largest < position <= file.size_bytes:
            largest, num_fruitless = position, 0
        else:
            num_fruitless += 1
        if num_fruitless == MAX_FRUITLESS:
            raise failure or ModelError(
                f"{file.url} has {file.size_bytes:,} bytes, but {position:,} came, and {MAX_FRUITLESS} tries in a row "
                "brought no more bytes; a proxy or mirror in between may serve another file, or only a part of it"
            )
        if position != file.size_bytes:
            stop.wait(FIRST_PAUSE_S * 2 ** max(num_fruitless - 1, 0))
    with partial.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        partial.unlink()
        raise ModelError(
            f"the download of {file.url} has sha256 {digest}, expected {file.sha256}; the download was removed. Start "
            "again; if this happens again, a proxy or mirror in between serves another file"
        )
    os.replace(partial, target)


def _try(
    file: LargeFile, partial: Path, on_position: Callable[[int], None], stop: threading.Event
) -> Exception | None:
    """Makes one request; returns an error after which the same request may succeed."""
    try:
        _append(file, partial, on_position, stop)
    except httpx2.TransportError as error:
        return error
    except HfHubHTTPError as error:
        if not _is_temporary(error):
            raise
        return error
    return None


def _append(
    file: LargeFile, partial: Path, on_position: Callable[[int], None], stop: threading.Event
) -> None:
    """Makes one request, and appends the answer to the partial file.

    The redirect to a content network does not get the token, since it is another host.
    """
    with partial.open("ab") as content:
        position = content.tell()
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if position:
            headers["Range"] = f"bytes={position}-"
        with get_session().stream(
            "GET", file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            hf_raise_for_status(response)
            if position and response.status_code != 206:  # the server does not support ranges
                content.truncate(0)
                position = 0
            on_position(position)
            for chunk in response.iter_raw():  # written at once, so that the bytes survive this process
                if stop.is_set():
                    raise Stopped
                content.write(chunk)
                position += len(chunk)
                on_position(position)


def _is_temporary(error: HfHubHTTPError) -> bool:
    """Whether the same request may succeed later."""
    status = error.response.status_code
    return status in (408, 429) or status >= 500
