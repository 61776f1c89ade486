"""Which files of a repository or folder form a model, by their names and the index; reads no weights."""

import fnmatch
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import ModelError
from engine.model_config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files for configuration, tokenizer and chat template."""
MAX_SHOWN = 12
"""Most file names in a message."""


def indexed_files(folder: Path) -> list[str]:
    """Names of a folder's safetensors files, from its index, else `model.safetensors`.

    Files may be missing.
    """
    if not (folder / INDEX_NAME).is_file():
        return [SINGLE_NAME]
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME}: expected a 'weight_map' from tensor names to files")
    return sorted({str(name) for name in weight_map.values()})


def has_safetensors(paths: Collection[str]) -> bool:
    return INDEX_NAME in paths or SINGLE_NAME in paths


def gguf_files(paths: Collection[str]) -> list[str]:
    """The GGUF files with a language model, without those of vision encoders."""
    return sorted(path for path in paths if path.endswith(".gguf") and "mmproj" not in path.lower())


def gguf_file(paths: Collection[str], wanted: str | None, model: str) -> str:
    """The one GGUF file of `paths` that matches `wanted`: a quantisation, a file's name, or a pattern.

    ModelError, with a proposal what to write after `model`, if no file matches, or more than one.
    """
    found = gguf_files(paths)
    if not found:
        others = ", ".join(sorted(paths)[:MAX_SHOWN]) or "nothing"
        raise ModelError(
            f"{model} has neither {SINGLE_NAME} nor {INDEX_NAME} nor a GGUF file; it has {others}"
        )
    matching = [path for path in found if wanted is None or _is_meant(path, wanted)]
    if len(matching) == 1 and not _is_part(matching[0]):
        return matching[0]
    if matching and all(_is_part(path) for path in matching):
        raise ModelError(
            f"{model}: {matching[0]} is one of several parts; download and join them: "
            "llama-gguf-split --merge FIRST_PART WHOLE_FILE, then --model WHOLE_FILE"
        )
    problem = (
        "several GGUF files"
        if wanted is None
        else f"{len(matching) or 'no'} GGUF files that match {wanted!r}"
    )
    shown = ", ".join(found[:MAX_SHOWN]) + (", ..." if len(found) > MAX_SHOWN else "")
    raise ModelError(f"{model} has {problem}; name one, such as {model}:{_example(found)}. There are {shown}")


class SafetensorsHeader(NamedTuple):
    """The header of a safetensors file."""

    num_bytes: int
    """Length of the header: the tensors' bytes begin here, and offsets count from here."""
    tensors: dict[str, Any]
    """By name: `dtype`, `shape` and `data_offsets`."""


def read_safetensors_header(file: Path) -> SafetensorsHeader:
    """Reads a file's header; ModelError if it is damaged."""
    try:
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= num_bytes <= file.stat().st_size - 8:
                raise ValueError(f"the header's length is {num_bytes:,}")
            header = json.loads(stream.read(num_bytes))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return SafetensorsHeader(8 + num_bytes, tensors)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error


def _is_meant(path: str, wanted: str) -> bool:
    name = path.rpartition("/")[2]
    if wanted.endswith(".gguf") or any(sign in wanted for sign in "*?["):
        return fnmatch.fnmatchcase(path, wanted) or fnmatch.fnmatchcase(name, wanted)
    return re.search(rf"(^|[-._]){re.escape(wanted)}([-._]|$)", name, re.IGNORECASE) is not None


def _is_part(path: str) -> bool:
    return re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path) is not None


def _example(found: list[str]) -> str:
    """The quantisation in the name of a file, as users write it; else the first file's name."""
    for path in found:
        if match := re.search(r"[-._]((I?Q\d\w*|BF16|F16|F32|MXFP4\w*))[-._]", path, re.IGNORECASE):
            return match[1]
    return found[0]
