"""Folders without a usable tokenizer: the error names the folder and the fault, whatever the libraries raise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from gateway.text import Tokenizer
from tests.factories.models import make_tokenizer_dir


def with_another_kind(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    content["model"]["type"] = "OfALaterVersion"
    path.write_text(json.dumps(content))


def with_a_prefix_longer_than_tokens(folder: Path) -> None:
    """The library panics: its exception is no Exception."""
    path = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def with_sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda folder: (folder / "tokenizer.json").write_text('{"version":'), "line 1 column"),
    "without its keys": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "KeyError: 'added_tokens'",
    ),
    "of a later version": (with_another_kind, "Exception: data did not match any variant"),
    "panicking": (with_a_prefix_longer_than_tokens, "PanicException"),
    "a list as configuration": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        "AttributeError",
    ),
    "a number as a token": (
        lambda folder: (folder / "special_tokens_map.json").write_text('{"eos_token": 7}'),
        "TypeError: Special token eos_token",
    ),
    "without tokenizer.json": (with_sentencepiece_alone, "may need the package sentencepiece or tiktoken"),
    "in Python": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}'),
        "ByT5Tokenizer is written in Python",
    ),
}


@pytest.mark.parametrize(("damage", "fault"), FAULTS.values(), ids=FAULTS)
def test_the_error_names_the_folder_and_the_fault(
    tmp_path: Path, damage: Callable[[Path], object], fault: str
) -> None:
    folder = make_tokenizer_dir(tmp_path)
    damage(folder)

    with pytest.raises(ModelError, match="has no usable tokenizer") as caught:
        Tokenizer(folder)

    assert str(folder) in str(caught.value)
    assert fault in str(caught.value)
