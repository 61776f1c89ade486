"""fetch: copies a folder of an object store, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, to the cache.

    CACHE/buckets/DIGEST/NAME/      DIGEST is of the URL and of the names, sizes and versions of its files

Each file appears by a rename when it is complete. A partial file is continued. On a volume without locks, each process
has its own partial files, which are not continued. s3fs and gcsfs find credentials in the environment or on the
machine.
"""

import fnmatch
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from baton.errors import ModelError
from baton.hub_name import HubName
from baton.system.file_lock import exclusive
from engine.loading.model_files import (
    SMALL,
    TEMPLATES_FOLDER,
    Progress,
    gguf_file,
    has_safetensors,
    indexed_files,
    is_template,
)

EXTRAS = {"s3": "s3fs", "gs": "gcsfs"}
"""Scheme -> the package that reads it. Baton's extra for the package has the name of the scheme."""
BUCKETS = "buckets"
"""The folder of the cache that has all copies."""
CHUNK_BYTES = 8 << 20


def fetch(url: str, cache_dir: Path, on_progress: Progress, *, weights: bool = True) -> Path:
    """The folder in the cache, or the GGUF file in it; downloads missing files.

    ModelError says what to do.
    """
    scheme = url.partition("://")[0]
    if scheme not in EXTRAS:
        name = HubName.parse("/".join(url.split("/")[3:5]))  # of https://huggingface.co/ORG/NAME
        remedy = f"; for a model of the Hugging Face Hub, write '{name}'" if name and "http" in scheme else ""
        raise ModelError(
            f"model {url!r}: {scheme}:// is not supported; supported are s3:// and gs://{remedy}"
        )
    try:
        return _fetch(url, cache_dir, on_progress, weights)
    except ImportError as error:
        raise ModelError(
            f"model {url!r} needs the package {EXTRAS[scheme]}: pip install 'baton[{scheme}]', or copy the folder "
            "to this machine"
        ) from error
    except ModelError:
        raise
    except Exception as error:  # each of these packages has errors of its own
        raise ModelError(f"cannot copy {url} to {cache_dir}: {type(error).__name__}: {error}") from error


def _fetch(url: str, cache_dir: Path, on_progress: Progress, weights: bool) -> Path:
    store, root = fsspec.core.url_to_fs(url)
    is_file = url.endswith(".gguf")
    found = {root: store.info(root)} if is_file else _listing(store, root)
    files = {path.rpartition("/")[2]: info for path, info in found.items()}
    if not files:
        raise ModelError(f"{url} holds no file")
    templates = [] if is_file else _templates(store, root, files)
    folder = cache_dir / BUCKETS / _digest(url, files) / str(root).rstrip("/").rpartition("/")[2]
    with exclusive(
        folder.parent / ".lock", lambda: on_progress(f"waiting for another process that reads {url}", 0.0)
    ) as is_alone:
        suffix = "partial" if is_alone else f"{uuid.uuid4().hex}.partial"
        folder.mkdir(exist_ok=True)
        small = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in SMALL)]
        _copy(store, files, [*small, *templates], folder, suffix, lambda *_: None)
        is_gguf = is_file or not has_safetensors(files)
        chosen = [gguf_file(files, None, url)] if is_gguf else indexed_files(folder, files)
        if unknown := sorted(set(chosen) - set(files)):
            raise ModelError(f"{url}: its index names {unknown[0]!r:.80}, which is not in the bucket")
        if weights or is_gguf:
            _copy(
                store,
                files,
                chosen,
                folder,
                suffix,
                lambda done, total: on_progress(
                    f"downloading {url}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", done / max(total, 1)
                ),
            )
    return folder / chosen[0] if is_gguf else folder


def _listing(store: Any, folder: str) -> dict[str, dict[str, Any]]:
    """The files of a folder, which may not exist. Raises the store's error if it refuses or fails."""
    try:
        found: dict[str, dict[str, Any]] = store.find(folder, maxdepth=1, detail=True, on_error="raise")
    except FileNotFoundError:
        return {}
    return found


def _templates(store: Any, root: str, files: dict[str, dict[str, Any]]) -> list[str]:
    """Adds the model's further chat templates to `files`; returns their paths in the model's folder."""
    found = _listing(store, f"{str(root).rstrip('/')}/{TEMPLATES_FOLDER}")
    paths = {f"{TEMPLATES_FOLDER}/{path.rpartition('/')[2]}": info for path, info in found.items()}
    templates = {path: info for path, info in paths.items() if is_template(path)}
    files.update(templates)
    return sorted(templates)


def _digest(url: str, files: dict[str, dict[str, Any]]) -> str:
    """A digest that changes if a file of the folder is replaced, provided that the store reports the files'
    versions."""
    versions = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "updated", "mtime", "created")
    listing = [
        [name, info["size"], *(str(info[key]) for key in versions if key in info)]
        for name, info in sorted(files.items())
    ]
    return hashlib.sha256(json.dumps([url, listing]).encode()).hexdigest()[:16]


def _copy(
    store: Any,
    files: dict[str, dict[str, Any]],
    names: list[str],
    folder: Path,
    suffix: str,
    on_bytes: Callable[[int, int], None],
) -> None:
    """Copies the files of `names` that are not in `folder` yet. `suffix`: the suffix of partial files' names; partial
    files with another suffix belong to other processes."""
    total, done = sum(files[name]["size"] for name in names), 0
    for name in names:
        target, size = folder / name, files[name]["size"]
        partial = target.with_name(f".{target.name}.{suffix}")
        if not target.is_file() or target.stat().st_size != size:
            target.parent.mkdir(exist_ok=True)
            with store.open(files[name]["name"], "rb") as source, partial.open("ab") as content:
                source.seek(position := content.tell())
                while chunk := source.read(CHUNK_BYTES):
                    content.write(chunk)
                    position += len(chunk)
                    on_bytes(done + position, total)
            if (copied := partial.stat().st_size) != size:
                partial.unlink()
                raise ModelError(
                    f"the copy of {files[name]['name']} has {copied:,} bytes, expected {size:,}; the copy was "
                    "removed. Start again"
                )
            os.replace(partial, target)
        done += size
