"""cached_models: the models in the Hub's cache and in Baton's cache, and whether each would load on this machine."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CachedRepoInfo,
    CachedRevisionInfo,
    CacheNotFound,
    HFCacheInfo,
    constants,
    scan_cache_dir,
)

from baton.config import BatonConfig
from baton.errors import ConfigError, ModelError
from engine.loading.bucket import BUCKETS
from engine.loading.dtype import ChosenDtype, dtype_of, with_chosen_dtype
from engine.loading.footprint import Footprint, check_room, footprint
from engine.loading.gguf import read_gguf
from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import gguf_files, has_safetensors
from engine.loading.pretrained import PRETRAINED, is_cached, resolve
from engine.model_config import read_json
from engine.quantization_config import QUANTIZATION_KEYS


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One cached model, and how a configuration would load it."""

    name: str
    """The name for `--model`."""
    path: Path
    """The folder, or the GGUF file."""
    size_bytes: int
    commit: str | None
    refs: tuple[str, ...]
    """Branches and tags under which this commit was downloaded."""
    architecture: str
    stored_as: str
    """The data type or quantization of most weights; empty if unknown."""
    dtype: ChosenDtype | None
    """The data types in which it would be served; None if it cannot be served."""
    footprint: Footprint | None
    """The memory that a worker needs for it; None if this is unknown."""
    problem: str
    """Why it cannot be loaded on this machine; empty if it can."""


def cached_models(config: BatonConfig, cache_dir: Path) -> list[CachedModel]:
    """The models that Baton knows by name, then copies from object stores, then models of the Hub in the order of their
    names, latest commit first.

    Reads headers, but no weights.
    """
    known = [name for name in PRETRAINED if is_cached(name, cache_dir)]
    found = [_examined(config, cache_dir, name, resolve(name, cache_dir)) for name in known]
    for copy in sorted((cache_dir / BUCKETS).glob("*/*/")):
        found += _of_copy(config, cache_dir, copy)
    try:
        hub = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return found
    by_name = {name: [model] for name, model in _damaged(hub)}
    for repo in hub.repos:
        if repo.repo_type == "model":
            revisions = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
            by_name[repo.repo_id] = [
                model for revision in revisions for model in _of_revision(config, cache_dir, repo, revision)
            ]
    return found + [model for _, models in sorted(by_name.items()) for model in models]


def _damaged(hub: HFCacheInfo) -> Iterator[tuple[str, CachedModel]]:
    """The models, by name, that the Hub's library leaves out, since their folders lack files."""
    known = {repo.repo_path.name for repo in hub.repos}
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        if folder.name not in known:
            name = folder.name.removeprefix("models--").replace("--", "/")
            reasons = [str(each) for each in hub.warnings if folder.name in re.split("[/)]", str(each))]
            problem = f"files are missing; `baton serve --model {name}` downloads them"
            problem = ": ".join([*reasons[:1], problem])
            yield name, CachedModel(name, folder, 0, None, (), "", "", None, None, problem)


def _of_copy(config: BatonConfig, cache_dir: Path, folder: Path) -> Iterator[CachedModel]:
    """The models of a copy from an object store: its folder, or each of its GGUF files. Their names are paths, since
    the cache does not know the URL."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    files = gguf_files(sizes)
    if has_safetensors(sizes) or not files:
        yield _examined(config, cache_dir, str(folder), folder, rest="`baton serve` with its URL")
    for name in files:
        yield _examined(config, cache_dir, str(folder / name), folder / name, sizes[name])


def _of_revision(
    config: BatonConfig, cache_dir: Path, repo: CachedRepoInfo, revision: CachedRevisionInfo
) -> Iterator[CachedModel]:
    """The models of a revision: its folder, and each of its GGUF files."""
    name = repo.repo_id if "main" in revision.refs else f"{repo.repo_id}@{revision.commit_hash}"
    folder = revision.snapshot_path
    sizes = {str(file.file_path.relative_to(folder)): file.size_on_disk for file in revision.files}
    files = gguf_files(sizes)
    refs = tuple(sorted(revision.refs))
    if has_safetensors(sizes) or not files:
        size_bytes = sum(size for path, size in sizes.items() if path not in files)
        yield _examined(config, cache_dir, name, folder, size_bytes, revision.commit_hash, refs)
    for path in files:
        yield _examined(
            config, cache_dir, f"{name}:{path}", folder / path, sizes[path], revision.commit_hash, refs
        )


def _examined(
    config: BatonConfig,
    cache_dir: Path,
    name: str,
    path: Path,
    size_bytes: int | None = None,
    commit: str | None = None,
    refs: tuple[str, ...] = (),
    rest: str | None = None,
) -> CachedModel:
    """`rest`: the command that downloads missing weights."""
    architecture = stored_as = problem = ""
    dtype: ChosenDtype | None = None
    memory = None
    try:
        folder = resolve(str(path), cache_dir)
        architecture, stored_as = _description(folder)
        asked = with_chosen_dtype(config, folder)
        memory, dtype = footprint(asked, folder), dtype_of(asked)
        if memory.weights is None:
            command = rest or f"`baton serve --model {name}`"
            raise ModelError(f"not all of its weights are here; {command} downloads the rest")
        check_room(memory, asked, name)
    except (ConfigError, ModelError) as error:
        problem = str(error)
    if size_bytes is None:
        size_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return CachedModel(name, path, size_bytes, commit, refs, architecture, stored_as, dtype, memory, problem)


def _description(folder: Path) -> tuple[str, str]:
    """The architecture, and the data type or quantization of most weights."""
    values = read_json(folder / "config.json")
    names = values.get("architectures")
    if not isinstance(names, list) or not names:
        names = [values.get("model_type") or ""]
    if (gguf := gguf_of(folder)) is not None:
        num_bytes: Counter[str] = Counter()
        for tensor in read_gguf(gguf).tensors.values():
            num_bytes[tensor.type.name] += tensor.num_bytes
        return str(names[0]), num_bytes.most_common(1)[0][0] if num_bytes else ""
    for key in QUANTIZATION_KEYS:
        if isinstance(quantized := values.get(key), dict):
            return str(names[0]), str(quantized.get("quant_method", ""))
    dtype = values.get("dtype") or values.get("torch_dtype") or ""
    return str(names[0]), str(dtype).removeprefix("torch.")
