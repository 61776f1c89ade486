"""Converts a GGUF model to safetensors, for engines that read nothing else: the same numbers in bfloat16."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.loading.gguf_folder import gguf_of
from engine.loading.gguf_weights import GgufWeights
from engine.loading.loader import takes_of
from engine.model_config import read_architecture, read_json


def with_safetensors(folder: Path, scratch: Path) -> Path:
    """The folder itself if it contains safetensors; otherwise a copy in `scratch` that contains them."""
    gguf = gguf_of(folder)
    if gguf is None:
        return folder
    copy = scratch / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(gguf.name, "manifest.json"))
    config = read_json(folder / "config.json") | {"dtype": "bfloat16"}
    (copy / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(folder)
    cpu = torch.device("cpu")
    weights = GgufWeights(gguf, torch.bfloat16, cpu, architecture.head_dim, keeps_groups=False)
    tensors = {take.name: weights.take_tensor(take.name, *take.shape) for take in takes_of(architecture)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
