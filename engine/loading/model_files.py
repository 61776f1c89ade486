"""Which files of a repository or folder form a model, by their names and the index; reads no weights."""

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import ModelError
from engine.model_config import read_json

Progress = Callable[[str, float], None]
"""Called with the current activity of a download and its completed fraction, from 0 to 1."""

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files for configuration, tokenizer and chat template."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""The folder of further chat templates, such as tool_use.jinja, in which transformers saves and looks for them."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""A gateway needs one of these files. transformers can make a tokenizer from each of them, but may need a further
package for others than tokenizer.json."""
MAX_SHOWN = 12
"""A message names at most this many files."""
COMPARED_BYTES = 2**24
"""Two tensors are compared in pieces of this size."""
VALUE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}
"""A value's bytes, by the data types that Baton reads."""


def indexed_files(folder: Path, remote: Collection[str] = ()) -> list[str]:
    """Names of a folder's safetensors files: `model.safetensors`, or those in the index if only the index exists.

    Files may be missing. transformers decides in the same way: if a model is saved twice to one folder, the index of
    the first files stays. `remote`: files that are not downloaded yet.
    """
    has_single = SINGLE_NAME in remote or (folder / SINGLE_NAME).is_file()
    if has_single or not (folder / INDEX_NAME).is_file():
        return [SINGLE_NAME]
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME}: expected a 'weight_map' from tensor names to files")
    names = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in names if not _is_inside(name)]:
        raise ModelError(f"{folder / INDEX_NAME}: {outside[0]!r:.80} is not a file of this folder")
    return names


def _is_inside(name: str) -> bool:
    """Whether this may be the path of a file below a folder. In a path, Linux refuses names of more than 255 bytes."""
    is_short = len(name) < 4096 and max(map(len, name.encode(errors="replace").split(b"/"))) < 256
    return is_short and not name.startswith("/") and ".." not in name.split("/")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, by name; see `indexed_files`. ModelError if one is missing."""
    files = [path / name for name in indexed_files(path)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{', '.join(missing)} does not exist; weights must be safetensors files{hint_of_gguf(path)}"
        )
    return files


def hint_of_gguf(folder: Path) -> str:
    """The end of a message about a folder without weights: what to do if it has other GGUF files."""
    files = sorted(folder.glob("*.gguf"))
    return f"; to serve a GGUF file, name the file: --model {files[0]}" if files else ""


def has_safetensors(paths: Collection[str]) -> bool:
    return INDEX_NAME in paths or SINGLE_NAME in paths


def is_template(path: str) -> bool:
    """Whether this is a further chat template; `path` is relative to the model's folder."""
    return fnmatch.fnmatchcase(path, f"{TEMPLATES_FOLDER}/*.jinja")


def gguf_files(paths: Collection[str]) -> list[str]:
    """The GGUF files with a language model, without those of vision encoders."""
    return sorted(path for path in paths if path.endswith(".gguf") and "mmproj" not in path.lower())


def gguf_file(paths: Collection[str], wanted: str | None, model: str) -> str:
    """The one GGUF file of `paths` that matches `wanted`: a quantization, a file's name, or a pattern.

    `model`: a name of the Hub, or the URL of a folder in an object store.

    ModelError if there is no such file, if several match, or if the file is one of several parts. If there are GGUF
    files to choose from, the message proposes a name that works, such as `MODEL:Q4_K_M`.
    """
    found = gguf_files(paths)
    if not found:
        others = ", ".join(sorted(paths)[:MAX_SHOWN]) or "nothing"
        raise ModelError(
            f"{model} has neither {SINGLE_NAME} nor {INDEX_NAME} nor a GGUF file; it has {others}"
        )
    matching = found if wanted is None else _meant(found, wanted)
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
    whole = next((file for file in found if not _is_part(file)), found[0])
    one = f"{model.rstrip('/')}/{whole}" if "://" in model else f"{model}:{_example(found)}"
    raise ModelError(f"{model} has {problem}; name one, such as {one}. There are {shown}")


class TensorEntry(NamedTuple):
    """A tensor in the header of a safetensors file."""

    file: Path
    dtype: str
    """The format's name of the data type, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Position of the tensor's first byte in the file."""
    num_bytes: int

    @property
    def num_values(self) -> int:
        return prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a folder's safetensors files, by name; ModelError if a file is missing or damaged, or if two files
    have different tensors of one name. vLLM and transformers would silently use the tensor of the last file."""
    tensors: dict[str, TensorEntry] = {}
    for file in indexed_files(folder):
        for name, entry in read_safetensors_header(folder / file).items():
            first = tensors.setdefault(name, entry)
            if first is not entry and not _are_equal(first, entry):
                raise ModelError(
                    f"{folder}: the tensor {name} of {first.file.name} differs from that of {entry.file.name}; the "
                    "files may be of different models: download them again, or keep this tensor in one of them"
                )
    return tensors


def _are_equal(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if first._replace(file=second.file, offset=second.offset) != second:
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        sizes = (
            min(COMPARED_BYTES, first.num_bytes - at) for at in range(0, first.num_bytes, COMPARED_BYTES)
        )
        return all(one.read(size) == other.read(size) for size in sizes)


def read_safetensors_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, by name; ModelError if its header is damaged, or the file is cut off."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            num_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= num_bytes <= size - 8:
                raise ValueError(f"the header's length is {num_bytes:,}")
            header = json.loads(stream.read(num_bytes))
        first = 8 + num_bytes
        tensors = {
            name: _entry(file, first, entry) for name, entry in header.items() if name != "__metadata__"
        }
        end = first
        for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset != end:
                raise ValueError(
                    f"tensor {name} begins at byte {entry.offset:,} of the file, but should begin at byte {end:,}; "
                    "download the file again"
                )
            end += entry.num_bytes
        if end != size:
            raise ValueError(
                f"the file has {size:,} bytes, but its header describes {end:,}; download the file again"
            )
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return tensors


def _entry(file: Path, first: int, entry: Mapping[str, Any]) -> TensorEntry:
    """One tensor of the header. `first`: the position in the file to which the header's offsets are relative."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int for number in (begin, end, *shape)):
        raise ValueError(
            f"a tensor has the shape {list(shape)} and the range {begin} to {end}, not whole numbers"
        )
    if not 0 <= begin <= end or not all(size >= 0 for size in shape):
        raise ValueError(f"the range of a tensor of shape {list(shape)} is {begin} to {end}")
    num_bytes, value_bytes = end - begin, VALUE_BYTES.get(str(entry["dtype"]))
    if value_bytes is not None and num_bytes != prod(shape) * value_bytes:
        raise ValueError(f"a tensor of type {entry['dtype']} and shape {list(shape)} has {num_bytes:,} bytes")
    return TensorEntry(file, str(entry["dtype"]), shape, first + begin, num_bytes)


def check_tokenizer(folder: Path) -> None:
    """ModelError if a folder has no tokenizer of any kind that gateways read."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer; a model folder needs tokenizer.json")


def _meant(paths: list[str], wanted: str) -> list[str]:
    """The files that match. A whole path means only this file. As in llama.cpp, `Q6_K` means `m-Q6_K.gguf`, even if
    there is a `m-Q6_K_L.gguf`."""
    if wanted in paths:
        return [wanted]
    if wanted.endswith(".gguf") or any(sign in wanted for sign in "*?["):
        return [
            path
            for path in paths
            if fnmatch.fnmatchcase(path, wanted) or fnmatch.fnmatchcase(path.rpartition("/")[2], wanted)
        ]
    matching: list[str] = []
    for ends in ("[-.]", "_"):
        pattern = re.compile(rf"(^|[-._]){re.escape(wanted)}{ends}", re.IGNORECASE)
        matching = matching or [path for path in paths if pattern.search(path.rpartition("/")[2])]
    return matching


def _is_part(path: str) -> bool:
    return re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path) is not None


def _example(found: list[str]) -> str:
    """A choice that works: the quantization in the name of a file, as users write it, or the file's path."""
    whole = [path for path in found if not _is_part(path)] or found
    for path in whole:
        match = re.search(r"[-._]((I?Q\d\w*|BF16|F16|F32|MXFP4\w*))[-._]", path, re.IGNORECASE)
        if match and _meant(found, match[1]) == [path]:
            return match[1]
    return whole[0]
