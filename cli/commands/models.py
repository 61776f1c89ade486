"""`baton models`: the models that are cached on this machine, and whether each would load here."""

import json
import os
from typing import Any

from rich.console import Console
from rich.text import Text

from baton.config import BatonConfig
from cli.console import wide_console
from cli.views import words
from engine.loading.cached_models import CachedModel, cached_models
from engine.loading.pretrained import default_cache_dir


def run(config: BatonConfig, *, as_json: bool) -> int:
    """Prints a row for each cached model, as `config` would serve it, and why some would not load."""
    models = cached_models(config, default_cache_dir(os.environ))
    if as_json:
        print(json.dumps([_object(model) for model in models]))
        return 0
    show(models, wide_console())
    return 0


def show(models: list[CachedModel], console: Console) -> None:
    if not models:
        console.print("no model is cached here; `baton serve --model ORG/NAME` downloads one", soft_wrap=True)
        return
    table = words.plain_table("model", "commit", "architecture", "stored as")
    for heading in ("size", "parameters", "weights", "KV per token", "tokens of KV"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for model in models:
        footprint = model.footprint
        weights = None if footprint is None else footprint.weights
        table.add_row(
            Text(model.name),
            Text((model.commit or "-")[:8], "dim"),
            Text(model.architecture or "-"),
            Text(model.stored_as or "-"),
            _bytes(model.size_bytes),
            words.amount(weights.num_parameters) if weights is not None else "-",
            _bytes(footprint.weight_bytes) if footprint is not None and weights is not None else "-",
            _bytes(footprint.kv_bytes_per_token) if footprint is not None else "-",
            words.amount(footprint.num_kv_tokens)
            if footprint is not None and footprint.num_kv_tokens is not None
            else "-",
            Text("no", "red") if model.problem else Text(f"in {model.dtype}", "green"),
        )
    console.print(table)
    for model in models:
        if model.problem:
            console.print(
                Text.assemble((f"{model.name}: ", "yellow"), words.one_line(model.problem)), soft_wrap=True
            )


def _object(model: CachedModel) -> dict[str, Any]:
    footprint = model.footprint
    weights = None if footprint is None else footprint.weights
    return {
        "name": model.name,
        "path": str(model.path),
        "commit": model.commit,
        "refs": list(model.refs),
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "stored_as": model.stored_as,
        "dtype": model.dtype.dtype if model.dtype else "",
        "kv_cache_dtype": model.dtype.of_kv if model.dtype else "",
        "num_parameters": weights and weights.num_parameters,
        "weight_bytes": weights and footprint and footprint.weight_bytes,
        "kv_bytes_per_token": footprint and footprint.kv_bytes_per_token,
        "num_kv_tokens": footprint and footprint.num_kv_tokens,
        "loads": not model.problem,
        "problem": model.problem,
    }


def _bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"
