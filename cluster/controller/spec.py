"""What clients are told of the model that a configuration serves; knows no Ray."""

from pathlib import Path

from baton.config import BatonConfig
from engine.loading.pretrained import PRETRAINED
from engine.model_config import read_architecture, read_eos_token_ids
from gateway import ServedModel


def served_model(config: BatonConfig, model_path: Path) -> ServedModel:
    """What clients are told of the model, from its folder and what the configuration makes of it."""
    architecture = read_architecture(model_path)
    name = config.model.path if config.model.path in PRETRAINED else model_path.name
    return ServedModel(
        name=name,
        path=str(model_path),
        max_model_len=config.scheduler.max_model_len or architecture.max_position_embeddings,
        vocab_size=architecture.vocab_size,
        eos_token_ids=read_eos_token_ids(model_path),
    )
