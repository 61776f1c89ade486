"""fetch: downloads the files that a Hub name needs, at one commit, to the Hub's cache.

huggingface_hub defines the cache's layout and reads the environment: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE.

    HF_HOME/hub/models--ORG--NAME/snapshots/COMMIT/   links to blobs/
    HF_HOME/hub/models--ORG--NAME/blobs/SHA256        and SHA256.incomplete, which the next start continues
    HF_HOME/hub/.locks/models--ORG--NAME/baton.lock   locked during a download: one per host or shared volume
"""

import glob
import logging
import shutil
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm

from baton.errors import ModelError
from baton.hub_name import HubName
from baton.system.file_lock import exclusive
from engine.loading.hub_download import LargeFile, Stopped, bytes_there, download
from engine.loading.hub_errors import explained, first_line
from engine.loading.model_files import (
    SMALL,
    Progress,
    gguf_file,
    gguf_files,
    has_safetensors,
    indexed_files,
    is_template,
)

logger = logging.getLogger(__name__)
logging.getLogger(snapshot_download.__module__).addFilter(
    lambda record: "No files matched" not in str(record.msg)
)
"""Hides this message, since a repository of GGUF files may have none of the small files."""

MAX_AT_ONCE = 8
"""At most this many files are downloaded at the same time."""
REPORT_EVERY_S = 0.1


def fetch(name: HubName, on_progress: Progress, *, weights: bool = True) -> Path:
    """The snapshot's folder, or a GGUF file in it; downloads missing files.

    A name with a commit that is in the cache needs no network. For another name, the Hub is asked for the
    commit; if the Hub is unreachable, the last known commit is used. Without `weights`, safetensors files are
    left out, but not a GGUF file, since it contains the tokenizer. ModelError says what to do.
    """
    with explained(name):
        folder = Path(_snapshot(name.repo, _revision(name), list(SMALL), ["*/*"]))
        paths, are_all = _paths(name.repo, folder)
        chosen, is_gguf = _weight_paths(name, folder, paths, are_all=are_all)
        if not is_gguf:
            _add_templates(name, folder, paths)
        wanted = chosen if weights or is_gguf else []
        if _missing(folder, wanted):
            _complete(name, folder, wanted, on_progress)
        return folder / chosen[0] if is_gguf else folder


class _NoBar(tqdm):
    """Disables huggingface_hub's progress bars, which would appear in logs; `fetch` reports progress."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def _revision(name: HubName) -> str | None:
    """What to download: the name's own revision or, if the Hub does not answer, the commit that this revision last
    stood for."""
    if name.commit is not None or constants.HF_HUB_OFFLINE:
        return name.revision
    hub, revision = HfApi(), name.revision or constants.DEFAULT_REVISION
    try:
        known = hub.resolve_revision(name.repo, revision=revision, local_files_only=True)
    except RevisionResolutionError:
        return revision
    try:
        commit = hub.repo_info(name.repo, revision=revision).sha
        if commit is None:
            raise ValueError("its answer names no commit")
    except RevisionNotFoundError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{hub.endpoint} gave no commit of {name} ({first_line(error)})"
        logger.warning("%s; using the last known commit, %s", problem, known.resolved)
        return known
    return known if commit == known.resolved else revision


def _snapshot(repo: str, revision: str | None, allow: list[str], ignore: list[str] | None = None) -> str:
    return snapshot_download(
        repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore, tqdm_class=_NoBar
    )


def _weight_paths(name: HubName, folder: Path, paths: list[str], *, are_all: bool) -> tuple[list[str], bool]:
    """The paths of the files with the model's weights, and whether they are a single GGUF file. `paths`, `are_all`:
    see `_paths`."""
    may_have_more = not are_all and not gguf_files(paths)
    if name.gguf is not None or not (has_safetensors(paths) or may_have_more):
        return [gguf_file(paths, name.gguf, name.repo)], True
    chosen = indexed_files(folder, paths)
    if are_all and (unknown := sorted(set(chosen) - set(paths))):
        raise ModelError(
            f"the index of {name.repo} names {unknown[0]!r:.80}, which the repository does not have"
        )
    return chosen, False


def _paths(repo: str, folder: Path) -> tuple[list[str], bool]:
    """The repository's files at this commit, and whether these are all.

    If the cache has no such list, because an older huggingface_hub filled the cache, returns the files in the cache.
    """
    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=folder.name)], True
    except CachedRepoTreeNotFoundError:
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()], False


def _add_templates(name: HubName, folder: Path, paths: Collection[str]) -> None:
    """Downloads the model's further chat templates, if the Hub can be asked. Otherwise the model is served with its
    default template: another program may have filled the cache."""
    missing = _missing(folder, [path for path in paths if is_template(path)])
    if not missing:
        return
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE forbids downloads")
        _snapshot(name.repo, folder.name, [glob.escape(path) for path in missing])
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is served without %s: %s", name, ", ".join(missing), first_line(error))


def _missing(folder: Path, paths: Collection[str]) -> list[str]:
    return [path for path in paths if not (folder / path).is_file()]


def _complete(name: HubName, folder: Path, paths: Collection[str], on_progress: Progress) -> None:
    """Downloads the missing files of `paths`, or waits while another process downloads them."""
    waiting = f"waiting for another process that downloads {name.repo}"
    cache_name = "models--" + name.repo.replace("/", "--")
    lock = Path(constants.HF_HUB_CACHE, ".locks", cache_name, "baton.lock")
    with exclusive(lock, lambda: on_progress(waiting, 0.0)) as is_alone:
        missing = _missing(folder, paths)
        if not missing:
            return
        blobs = folder.parent.parent / "blobs"
        blobs.mkdir(exist_ok=True)
        files = _large_files(name.repo, folder.name, missing)
        _check_room(name.repo, files, blobs)
        if is_alone:  # else huggingface_hub downloads them: it allows two processes, with separate files
            _download_all(name.repo, files, blobs, on_progress)
        _snapshot(name.repo, folder.name, [glob.escape(path) for path in missing])


def _large_files(repo: str, commit: str, paths: Collection[str]) -> list[LargeFile]:
    """The files of `paths` that `hub_download` downloads.

    huggingface_hub downloads all others: files in git itself, and files too large for HTTP. With
    HF_XET_HIGH_PERFORMANCE it also downloads all files that Xet stores; this is fast, but does not continue
    partial files.
    """
    found = {file.path: file for file in HfApi().list_repo_tree(repo, revision=commit, recursive=True)}
    large = []
    for path in paths:
        file = found.get(path)
        if isinstance(file, RepoFile) and file.lfs is not None:
            left_to_xet = file.xet_hash is not None and constants.HF_XET_HIGH_PERFORMANCE
            if file.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and not left_to_xet:
                url = hf_hub_url(repo, path, revision=commit, endpoint=constants.ENDPOINT)
                large.append(LargeFile(url, file.lfs.size, file.lfs.sha256))
    return list({file.sha256: file for file in large}.values())


def _check_room(repo: str, files: Collection[LargeFile], blobs: Path) -> None:
    needed = sum(file.size_bytes - bytes_there(file, blobs) for file in files)
    free = shutil.disk_usage(blobs).free
    if needed > free:
        raise ModelError(
            f"{repo} needs {_size(needed)} more in {constants.HF_HUB_CACHE}, where {_size(free)} are free; free some, "
            "or set HF_HOME to a folder on another disk"
        )


def _download_all(repo: str, files: list[LargeFile], blobs: Path, on_progress: Progress) -> None:
    """Downloads several files at once. The first error or Ctrl-C ends all downloads. Partial files stay."""
    total = sum(file.size_bytes for file in files)
    positions = {file.sha256: bytes_there(file, blobs) for file in files}
    stop, turn, reported_at = threading.Event(), threading.Lock(), 0.0

    def report(file: LargeFile, position: int) -> None:
        nonlocal reported_at
        with turn:
            positions[file.sha256] = position
            if (now := time.monotonic()) - reported_at >= REPORT_EVERY_S:
                reported_at = now
                done = sum(positions.values())
                on_progress(f"downloading {repo}: {_size(done)} of {_size(total)}", done / max(total, 1))

    def download_one(file: LargeFile) -> None:
        try:
            download(file, blobs, lambda position: report(file, position), stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="download") as threads:
        tasks = [threads.submit(download_one, file) for file in files]
        try:
            errors = [error for task in tasks if (error := task.exception()) is not None]
        finally:
            stop.set()
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    on_progress(f"downloading {repo}: {_size(total)} of {_size(total)}", 1.0)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} kB"
