"""demands: checks what a configuration asks of a model and a kind of device; imports no torch."""

import re
from collections.abc import Iterable

from baton.config import BatonConfig, ModelConfig
from baton.errors import ConfigError, ModelError
from baton.worker import WorkerRole
from engine.families import Family
from engine.loading.vocabulary import ROUNDED_GROUP_SIZE
from engine.mixture_config import Mixture
from engine.model_config import ModelArchitecture, check_device

GROUPED = ("int8", "int4")
"""Values of `model.quantization` that only a CPU supports."""
_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$")


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
            f"model.quantization: {config.quantization!r} is only for engine.device 'cpu'; with {device!r}, use "
            "'fp8', or 'none'"
        )


def check_shares(architecture: ModelArchitecture, num_ranks: int, *, expert_parallel: bool) -> None:
    """ConfigError if the ranks cannot share heads, MLPs, experts or the vocabulary."""
    kv_heads = [] if architecture.latent is not None else [("KV", architecture.num_kv_heads)]
    for what, count in (("attention", architecture.num_heads), *kv_heads):
        if count % num_ranks:
            raise ConfigError(f"{_got(num_ranks)}, which does not divide this model's {count} {what} heads")
    mixture = _mixture_of(architecture)
    if expert_parallel:
        _check_expert_parallel(architecture, mixture, num_ranks)
    elif mixture is not None and mixture.intermediate_size % num_ranks:
        raise ConfigError(
            f"{_got(num_ranks)}, which does not divide the intermediate size of this model's experts, "
            f"{mixture.intermediate_size}; use another number, or engine.enable_expert_parallel"
        )
    for what, size in _mlps(architecture):
        if size % num_ranks:
            raise ConfigError(
                f"{_got(num_ranks)}, which does not divide the intermediate size of {what}, {size}; use "
                "another number"
            )
    if -(-architecture.vocab_size // num_ranks) * (num_ranks - 1) >= architecture.vocab_size:
        raise ConfigError(
            f"{_got(num_ranks)}, but this model's vocabulary of {architecture.vocab_size} tokens is too small for so "
            "many ranks; use a lower number"
        )


def check_groups(config: BatonConfig, architecture: ModelArchitecture) -> None:
    """ConfigError if `int8` or `int4` cannot round a rank's part of a matrix, which must consist of whole groups.

    Call it only for weights that are not quantized yet: matrices that stay quantized keep their groups.
    """
    if config.model.quantization in GROUPED:
        for role in WorkerRole:
            _check_groups(
                config.model.quantization,
                architecture,
                config.num_ranks(role),
                expert_parallel=config.has_expert_parallel(role),
            )


def _check_groups(
    quantization: str, architecture: ModelArchitecture, num_ranks: int, *, expert_parallel: bool
) -> None:
    latent, mixture = architecture.latent, _mixture_of(architecture)
    value_dim = architecture.head_dim if latent is None else latent.value_dim
    inputs = [("hidden_size", architecture.hidden_size, 1)]
    inputs += [("the heads' values", architecture.num_heads * value_dim, num_ranks)]
    inputs += [(f"the intermediate size of {what}", size, num_ranks) for what, size in _mlps(architecture)]
    if mixture is not None:
        experts = "the intermediate size of this model's experts"
        inputs.append((experts, mixture.intermediate_size, 1 if expert_parallel else num_ranks))
    if latent is not None and latent.query_rank is not None:
        inputs.append(("q_lora_rank", latent.query_rank, 1))
    for what, size, divisor in inputs:
        if size // divisor % ROUNDED_GROUP_SIZE:
            part = "" if divisor == 1 else f", of which each of {divisor} ranks has {size // divisor}"
            raise ConfigError(
                f"model.quantization: {quantization!r} needs whole groups of {ROUNDED_GROUP_SIZE} inputs, but "
                f"{what} is {size}{part}; use 'auto'"
                + ("" if divisor == 1 else ", or another engine.tensor_parallel or cluster.*_tensor_parallel")
            )


def _got(num_ranks: int) -> str:
    return f"engine.tensor_parallel or cluster.*_tensor_parallel: got {num_ranks}"


def _mixture_of(architecture: ModelArchitecture) -> Mixture | None:
    return next((each for each in architecture.mixtures if each is not None), None)


def _mlps(architecture: ModelArchitecture) -> list[tuple[str, int]]:
    """The intermediate sizes of the MLPs that all tokens use."""
    sizes = [("this model's MLPs", architecture.intermediate_size)] if None in architecture.mixtures else []
    mixture = _mixture_of(architecture)
    if mixture is not None and mixture.shared_size:
        sizes.append(("this model's shared experts", mixture.shared_size))
    return sizes


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
            "each rank needs an expert; use fewer ranks, or remove the key"
        )


def check_experts(architecture: ModelArchitecture, names: Iterable[str]) -> None:
    """ModelError if a tensor of these names contains all experts of a layer.

    For gpt-oss, such tensors are supported: its checkpoints have no other ones.
    """
    if architecture.family is not Family.GPT_OSS:
        for name in names:
            if _ALL_EXPERTS.search(name):
                raise ModelError(
                    f"tensor {name} holds all experts of a layer, which is not supported; use the model's original "
                    "checkpoint, which has a tensor for each expert"
                )
