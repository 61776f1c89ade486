"""Where a model's folder was downloaded from: part of its digest, and of the name that all workers load."""

import re
from itertools import pairwise
from pathlib import Path

from baton.config import BatonConfig
from baton.hub_name import HubName
from engine.loading.gguf_folder import gguf_of


def commit_of(folder: Path) -> str | None:
    """The commit in a path of the Hub's cache, .../snapshots/COMMIT; None for a folder elsewhere."""
    return _name_below("snapshots", 40, folder)


def source_of(folder: Path) -> Path:
    """The folder, or the GGUF file from which a folder of Baton's cache was made. The source's path shows where the
    model was downloaded from."""
    gguf = gguf_of(folder)
    return gguf.readlink() if gguf is not None and gguf.is_symlink() else folder


def version_of(folder: Path) -> str | None:
    """The commit in a path of the Hub's cache, or the version in the path of a copy from an object store
    (.../buckets/VERSION). None for any other folder."""
    return commit_of(folder) or _name_below("buckets", 16, folder)


def _name_below(above: str, num_digits: int, folder: Path) -> str | None:
    """The part of a folder's path that has `num_digits` hexadecimal digits, below a part named `above`."""
    for parent, name in reversed(list(pairwise(source_of(folder).parts))):
        if parent == above and re.fullmatch(f"[0-9a-f]{{{num_digits}}}", name):
            return name
    return None


def with_commit(config: BatonConfig, model_path: Path) -> BatonConfig:
    """The configuration with a `model.path` that means the same on all machines and after a restart."""
    path = pinned(config.model.path, model_path)
    if path == config.model.path:
        return config
    return config.model_copy(update={"model": config.model.with_values("model", path=path)})


def pinned(text: str, folder: Path) -> str:
    """A name of the Hub with the commit of its folder `folder`; any other text unchanged.

    If the text is a relative path that looks like a name of the Hub, returns the folder's whole path."""
    name = HubName.parse(text)
    if name is None:
        return text
    commit = commit_of(folder)
    return str(folder) if commit is None else str(name.at(commit))
