"""Downloads a model's files and verifies their hashes: fetch_model.py FILES.json FOLDER [--skip PATTERN].

FILES.json holds a list of {"url", "sha256", "name"}; the default name is the last part of the URL's path. A file with
the right hash is not downloaded again. Files appear only when complete. Of several pods with the same volume, one
downloads a file while the others wait. Exit code 1 if a download fails or has another hash.
"""

import argparse
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 20
PATIENCE_S = 60
"""How long a download waits for its next bytes."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced. None: there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def sole(path: Path) -> Iterator[None]:
    """Holds a lock, so that only one pod at a time runs the `with` block. When the owner of the lock dies, the kernel
    releases the lock. On NFS, flock is valid for all hosts since Linux 2.6.12, and the server releases the lock."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{path.name} is being fetched by another pod; waiting", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            sweep(path)
        except OSError as error:  # better twice than not at all
            print(
                f"{path.name}: this volume has no locks ({error.strerror}); others may fetch it, too",
                flush=True,
            )
        yield


def sweep(path: Path) -> None:
    """Removes the partial files of killed downloads; the lock excludes other writers."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        draft.unlink()


def fetch(url: str, path: Path, sha256: str) -> None:
    """Downloads a file. Raises OSError if this fails, or if the sha256 is another one."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            try:
                while chunk := response.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                is_cut_off = bool(response.length)  # the bytes of Content-Length that have not come
            except IncompleteRead:
                is_cut_off = True
            if is_cut_off:
                raise OSError("the connection broke before the end of the file")
        if digest.hexdigest() != sha256:
            raise OSError(f"{path.name}: sha256 is {digest.hexdigest()}, expected {sha256}")
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def ensure(url: str, path: Path, sha256: str) -> str:
    """Downloads a file unless it exists, and says which was the case. Only the download holds the lock: verifying a
    large file takes minutes, and many pods may do it at once."""
    while True:
        version = version_of(path)
        if version is not None and sha256_of(path) == sha256:
            return "is there"
        with sole(path):
            if version_of(path) == version:  # else another pod has just replaced the file: verify that one
                fetch(url, path, sha256)
                return "fetched"


def main() -> int:
    parser = argparse.ArgumentParser(description="fetches a model's files")
    parser.add_argument("files", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for entry in json.loads(options.files.read_text()):
        try:
            name = entry.get("name") or urlsplit(entry["url"]).path.rpartition("/")[2]
            if fnmatch.fnmatch(name, options.skip):
                continue
            done = ensure(entry["url"], options.folder / name, entry["sha256"])
        except OSError as error:
            print(f"fetch_model.py: {name}: {error}", file=sys.stderr)
            return 1
        except (ValueError, HTTPException) as error:
            # A query, a user or the error's text may hold a secret.
            url = re.sub(r"//[^/]*@", "//", entry["url"].partition("?")[0])
            print(
                f"fetch_model.py: {url}: not a usable URL, or not HTTP ({type(error).__name__})",
                file=sys.stderr,
            )
            return 1
        print(f"{name} {done}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
