"""demands: checks what a configuration asks of a model and a kind of device; imports no torch."""

import re
from collections.abc import Iterable

from baton.config import BatonConfig, ModelConfig
from baton.errors import ConfigError, ModelError
from baton.worker import WorkerRole
from engine.families import Family
from engine.mixture_config import Mixture
from engine.model_config import ModelArchitecture, check_device

GROUPED = ("int8", "int4")
"""Values of `model.quantization` that only a CPU supports."""
_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$")
_OF_SINGLE_EXPERTS = (Family.QWEN3_MOE, Family.MIXTRAL)


def check_demands(config: BatonConfig, architecture: ModelArchitecture) -> None:
    """ConfigError or ModelError if a worker of either role would refuse this model."""
    check_device(architecture, config.engine.device)
    check_quantization(config.model, config.engine.device)
    for role in WorkerRole:
        check_shares(architecture, config.num_ranks(role), expert_parallel=config.has_expert_parallel(role))


def check_quantization(config: ModelConfig, device: str) -> None:
    """ConfigError if this kind of device does not support `model.quantization`."""
    if config.quantization in GROUPED and device != "cpu":
        raise ConfigError(
            f"model.quantization: {config.quantization!r} is for engine.device 'cpu'; with {device!r}, use 'fp8', "
            "or 'none'"
        )


def check_shares(architecture: ModelArchitecture, num_ranks: int, *, expert_parallel: bool = False) -> None:
    """ConfigError if the ranks cannot share heads or experts equally; Shard checks the other dimensions."""
    kv_heads = [] if architecture.latent is not None else [("KV", architecture.num_kv_heads)]
    for what, count in (("attention", architecture.num_heads), *kv_heads):
        if count % num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel or cluster.*_tensor_parallel: got {num_ranks}, which does not "
                f"divide this model's {count} {what} heads"
            )
    mixture = next((each for each in architecture.mixtures if each is not None), None)
    if expert_parallel:
        _check_expert_parallel(architecture, mixture, num_ranks)
    elif mixture is not None and mixture.intermediate_size % num_ranks:
        raise ConfigError(
            f"engine.tensor_parallel or cluster.*_tensor_parallel: got {num_ranks}, which does not divide the "
            f"intermediate size of this model's experts, {mixture.intermediate_size}; use another number, or "
            "engine.enable_expert_parallel"
        )


def _check_expert_parallel(architecture: ModelArchitecture, mixture: Mixture | None, num_ranks: int) -> None:
    keys = "engine.enable_expert_parallel or cluster.*_enable_expert_parallel"
    if mixture is None:
        raise ConfigError(
            f"{keys}: got true, but this model has no experts (model_type {architecture.family.value!r}); remove "
            "the key"
        )
    if num_ranks > mixture.num_experts:
        raise ConfigError(
            f"{keys}: got true, but {num_ranks} ranks are more than this model's {mixture.num_experts} experts, and "
            "each needs one; use fewer ranks, or remove the key"
        )


def check_experts(architecture: ModelArchitecture, names: Iterable[str]) -> None:
    """ModelError if a tensor of these names contains all experts of a layer, if the family forbids that."""
    if architecture.family in _OF_SINGLE_EXPERTS:
        for name in names:
            if _ALL_EXPERTS.search(name):
                raise ModelError(
                    f"tensor {name} holds all experts of a layer, which is not supported; use the model's original "
                    "checkpoint, which has a tensor for each expert"
                )
