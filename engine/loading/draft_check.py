"""Checks, by the small files of their folders, whether a model may have a draft model, and which; imports no torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.config import SpeculationConfig
from baton.errors import ConfigError, ModelError
from engine.layer_groups import group_layers
from engine.model_config import ModelArchitecture


def check_served(speculation: SpeculationConfig, served: ModelArchitecture) -> None:
    """ConfigError if the served model cannot have the draft model that is configured."""
    if speculation.method != "draft_model":
        return
    if _has_windows(served):
        raise ConfigError(
            "speculation.method: got 'draft_model', but the served model has sliding windows, so its KV is freed "
            "while a draft model still needs it; use 'ngram'"
        )
    if speculation.draft_layers is not None and speculation.draft_layers > served.num_layers:
        raise ConfigError(
            f"speculation.draft_layers: got {speculation.draft_layers}, but the served model has {served.num_layers} "
            "layers"
        )


@contextmanager
def errors_of_draft() -> Iterator[None]:
    """Adds the configuration's key to ModelErrors about the draft model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"speculation.draft_model: {error}") from error


def check_draft(
    draft: ModelArchitecture, folder: Path, served: ModelArchitecture, served_folder: Path
) -> None:
    """ModelError if an id means one token to the draft model and another to the served model, or if the draft model
    has sliding windows."""
    if draft.vocab_size != served.vocab_size:
        raise ModelError(
            f"{folder} has {draft.vocab_size} tokens in its vocabulary, but the served model "
            f"{served_folder} has {served.vocab_size}; a draft model needs the same vocabulary"
        )
    if folder != served_folder and _tokens(folder) != _tokens(served_folder):
        raise ModelError(
            f"the vocabulary of {folder} differs from that of the served model "
            f"{served_folder}; a draft model needs the same vocabulary"
        )
    if _has_windows(draft):
        raise ModelError(f"{folder} has sliding windows, which a draft model may not have")


def _has_windows(architecture: ModelArchitecture) -> bool:
    """Whether KV of this model is freed early."""
    layers = group_layers(architecture.sliding_windows, architecture.max_position_embeddings)
    return layers.groups.num_windowed > 0


def _tokens(folder: Path) -> tuple[Any, Any]:
    """The vocabulary and the added tokens of a folder's tokenizer."""
    file = folder / "tokenizer.json"
    try:
        values = json.loads(file.read_bytes())
        added = [(each["id"], each["content"]) for each in values.get("added_tokens", ())]
        return values["model"]["vocab"], added
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the vocabulary in {file}: {error!r}") from error
