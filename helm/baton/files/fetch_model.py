"""Fetches a model's files, and proves that they are what was named: fetch_model.py FILES.json FOLDER [--skip PATTERN].

FILES.json holds a list of {"url", "sha256", "name"}; without a name it is the URL's last part. A file that is there
with the right hash is left alone. Files appear whole or not at all, so several pods may do this on one volume at once.
Exit code 1 if a file could not be had or is another one.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

CHUNK_BYTES = 1 << 20
PATIENCE_S = 60
"""For the next bytes."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(url: str, path: Path, sha256: str) -> None:
    """Raises OSError, also if what came is another file."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            while chunk := response.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != sha256:
            raise OSError(f"{path.name}: sha256 is {digest.hexdigest()}, expected {sha256}")
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="fetches a model's files")
    parser.add_argument("files", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for entry in json.loads(options.files.read_text()):
        name = entry.get("name") or entry["url"].rpartition("/")[2]
        path = options.folder / name
        if fnmatch.fnmatch(name, options.skip):
            continue
        if path.is_file() and sha256_of(path) == entry["sha256"]:
            print(f"{name} is there", flush=True)
            continue
        try:
            fetch(entry["url"], path, entry["sha256"])
        except OSError as error:
            print(f"fetch_model.py: {name}: {error}", file=sys.stderr)
            return 1
        print(f"{name} fetched", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
