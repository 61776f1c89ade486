"""Which files of a repository or folder make a model: by their names alone, and the index; reads no weights."""

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
"""Configuration, tokenizer and chat template, beside which other formats' weights may lie."""
MAX_SHOWN = 12
"""File names in a message."""


def indexed_files(folder: Path) -> list[str]:
    """Names of a folder's safetensors files, by its index, else `model.safetensors`; they need not be there."""
    if not (folder / INDEX_NAME).is_file():
        return [SINGLE_NAME]
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME}: expected a 'weight_map' from tensor names to files")
    return sorted({str(name) for name in weight_map.values()})


def has_safetensors(paths: Collection[str]) -> bool:
    return INDEX_NAME in paths or SINGLE_NAME in paths


def gguf_files(paths: Collection[str]) -> list[str]:
    """Those that hold a language model; a vision encoder's lies beside it."""
    return sorted(path for path in paths if path.endswith(".gguf") and "mmproj" not in path.lower())


def gguf_file(paths: Collection[str], wanted: str | None, model: str) -> str:
    """The one GGUF file of `paths` that `wanted` names: a quantisation as in llama.cpp, a file's name or a pattern.

    ModelError, which says what to write after `model`, if there is none or more than one.
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
    """What a file says of its tensors."""

    num_bytes: int
    """The tensors' bytes begin here, and their offsets count from here."""
    tensors: dict[str, Any]
    """By name: `dtype`, `shape` and `data_offsets`."""


def read_safetensors_header(file: Path) -> SafetensorsHeader:
    """ModelError if the header is damaged."""
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
    """The quantisation in a file's name, as users write it; else the name."""
    for path in found:
        if match := re.search(r"[-._]((I?Q\d\w*|BF16|F16|F32|MXFP4\w*))[-._]", path, re.IGNORECASE):
            return match[1]
    return found[0]
