"""demands: what a configuration may not ask of a model or a kind of device, by its key; imports no torch."""

import re
from collections.abc import Iterable

from baton.config import BatonConfig, ModelConfig
from baton.errors import ConfigError, ModelError
from baton.worker import WorkerRole
from engine.families import Family
from engine.model_config import ModelArchitecture, check_device

GROUPED = ("int8", "int4")
"""Values of `model.quantization` whose products only a CPU computes."""
_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$")
_OF_SINGLE_EXPERTS = (Family.QWEN3_MOE, Family.MIXTRAL)


def check_demands(config: BatonConfig, architecture: ModelArchitecture) -> None:
    """ConfigError, or ModelError for the kind of device, if a worker of either role would refuse this model."""
    check_device(architecture, config.engine.device)
    check_quantization(config.model, config.engine.device)
    for role in WorkerRole:
        check_shares(architecture, config.num_ranks(role))


def check_quantization(config: ModelConfig, device: str) -> None:
    """ConfigError if this kind of device cannot multiply what `model.quantization` says."""
    if config.quantization in GROUPED and device != "cpu":
        raise ConfigError(
            f"model.quantization: {config.quantization!r} is for engine.device 'cpu'; with {device!r}, use 'fp8', "
            "or 'none'"
        )


def check_shares(architecture: ModelArchitecture, num_ranks: int) -> None:
    """ConfigError if heads cannot be shared equally; see Shard for the other dimensions."""
    kv_heads = [] if architecture.latent is not None else [("KV", architecture.num_kv_heads)]
    for what, count in (("attention", architecture.num_heads), *kv_heads):
        if count % num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel or cluster.*_tensor_parallel: got {num_ranks}, which does not "
                f"divide this model's {count} {what} heads"
            )


def check_experts(architecture: ModelArchitecture, names: Iterable[str]) -> None:
    """ModelError if a checkpoint's tensors, by these names, hold all experts of a layer at once."""
    if architecture.family in _OF_SINGLE_EXPERTS:
        for name in names:
            if _ALL_EXPERTS.search(name):
                raise ModelError(
                    f"tensor {name} holds all experts of a layer, which is not supported; use the model's original "
                    "checkpoint, which has a tensor for each expert"
                )
