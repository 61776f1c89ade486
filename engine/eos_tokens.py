"""read_eos_token_ids, named_eos_token_ids: the tokens that end an answer, as the files of a model folder name them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.errors import ModelError
from engine.model_config import read_json


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that generation_config.json names, or otherwise config.json, and the tokenizer's end token.

    The tokenizer's end token counts, too, as in vLLM: fine-tuned models often name the end of a turn only there.
    """
    named = named_eos_token_ids(folder)
    of_tokenizer = _of_tokenizer(folder)
    return named if of_tokenizer is None or of_tokenizer in named else (*named, of_tokenizer)


def named_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Like `read_eos_token_ids`, but without the tokenizer, whose file may have 30 MB."""
    return _named(folder, "generation_config.json") or _named(folder, "config.json")


def _named(folder: Path, name: str) -> tuple[int, ...]:
    given = _read(folder / name).get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids):
        raise ModelError(
            f"{folder / name}: eos_token_id must be a token, a list of tokens, or null, got {given!r:.80}"
        )
    return tuple(ids)


def _of_tokenizer(folder: Path) -> int | None:
    """The id of `eos_token`; None if the files name no `eos_token`, or if no special token has this text."""
    config = _read(folder / "tokenizer_config.json")
    # Older folders name special tokens in a file of their own.
    named = config if "eos_token" in config else _read(folder / "special_tokens_map.json")
    token = _content(named.get("eos_token"))
    if token is None:
        return None
    return next((token_id for token_id, content in _added_tokens(folder, config) if content == token), None)


def _added_tokens(folder: Path, config: dict[str, Any]) -> Iterator[tuple[int, str | None]]:
    """Special tokens and their ids. tokenizer.json is read only if needed."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        yield from ((int(key), _content(token)) for key, token in decoder.items() if key.isdecimal())
    added = _read(folder / "tokenizer.json").get("added_tokens")
    if isinstance(added, list):
        for token in added:
            if isinstance(token, dict) and type(token.get("id")) is int:
                yield token["id"], _content(token)


def _content(token: object) -> str | None:
    """The text of a token. A file stores either this text, or an object that contains it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
