"""What a configuration asks for: which workers there are, and what clients are told of the model; knows no Ray."""

from pathlib import Path

from baton.config import BatonConfig
from baton.worker import WorkerRole
from engine.loading.pretrained import PRETRAINED
from engine.model_config import read_architecture, read_eos_token_ids
from gateway import ServedModel


def worker_names(config: BatonConfig) -> list[tuple[str, WorkerRole]]:
    """The fleet by name: w0, w1, ..., prefill workers first. A name says nothing of a role: roles may change."""
    prefill, decode = config.cluster.prefill, config.cluster.decode
    roles = [WorkerRole.PREFILL] * prefill + [WorkerRole.DECODE] * decode
    return [(f"w{index}", role) for index, role in enumerate(roles)]


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
