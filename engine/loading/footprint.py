"""footprint: a model's memory on a worker, computed from the headers of its files; imports no torch."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import ModelError
from baton.worker import WorkerRole
from engine.allocator import available_memory
from engine.eos_tokens import named_eos_token_ids
from engine.layer_groups import group_layers
from engine.loading.demands import check_demands, check_groups
from engine.loading.dtype import dtype_of
from engine.loading.model_files import check_tokenizer
from engine.loading.stored_head import as_stored
from engine.loading.stored_weights import Size, StoredWeights, dummy_weights, is_quantized, read_weights
from engine.loading.vocabulary import ROUNDED_GROUP_SIZE, bits_in_groups, vocabulary_bytes
from engine.model_config import (
    ModelArchitecture,
    check_kv_scales,
    read_architecture,
)
from engine.native.compilers import may_have_kernels
from engine.quantization_config import FIRST_WITH_FP8

CPU_KV_CACHE_MIB = 1024
"""Size of a CPU's pool for keys and values of 16 or 8 bits. In float32 the pool is twice as large, so that it
has room for as many tokens as with 16 bits."""
BITS_KEPT = {"fp8": 8.0, "int8": 9.0, "int4": 5.0}
"""The most bits that a weight takes, by `model.quantization`: 32 weights share a scale and a minimum of 16 bits
each.
Weights that are rounded to int8 while loading need no minimum."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
GPU_BLOCK_SIZE = 64
"""The default of `scheduler.block_size` on a GPU. The bulk copy engine (TMA) loads a tile of keys from one block, so
smaller blocks would mean smaller tiles (engine/kernels/attention_tuning.py)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one worker.

    Bytes of weights are approximate: norms and biases may be stored in another data type.
    """

    weights: StoredWeights | None
    """None if this folder lacks some weights. With `load_format: dummy`: the weights that a worker makes."""
    weight_bytes: int
    """Bytes of the weights in the worker's memory; 0 without weights."""
    kv_bytes_per_token: int
    """Bytes on all ranks together; every rank stores the whole latent."""
    kv_pool_bytes: int | None
    """Bytes on all ranks together; None if a worker measures the size at its start, or this machine lacks the
    device."""
    num_kv_tokens: int | None
    """For how many tokens of KV the pool has room; for more if `frees_early`."""
    frees_early: bool
    """Whether layers with a window free KV that has left the window."""
    draft_weight_bytes: int
    """Bytes of a draft model's weights. Its KV is included in `kv_pool_bytes` and `kv_bytes_per_token`."""
    fullest_rank_bytes: int | None
    """Bytes of the weights on the rank that has the most bytes, among workers of both roles. None without expert
    parallelism, since then all ranks have the same bytes."""

    def __str__(self) -> str:
        parts = []
        if self.weights is not None:
            parts.append(
                f"{_count(self.weights.num_parameters)} parameters, {_mib(self.weight_bytes)} of weights"
            )
        if self.weights is not None and self.fullest_rank_bytes is not None:
            parts[-1] += f", at most {_mib(self.fullest_rank_bytes)} on a rank"
        if self.draft_weight_bytes:
            parts.append(f"{_mib(self.draft_weight_bytes)} of a draft model's weights")
        kib = f"{self.kv_bytes_per_token / 1024:,.2f}".rstrip("0").rstrip(".")
        parts.append(f"{kib} KiB of KV per token")
        if self.kv_pool_bytes is not None:
            pool = _mib(self.kv_pool_bytes)
            tokens = f"{'at least ' if self.frees_early else ''}{self.num_kv_tokens:,} tokens"
            parts.append(f"{pool} of KV hold {tokens} on each worker")
        return "; ".join(parts)


def footprint(config: BatonConfig, folder: Path, draft_folder: Path | None = None) -> Footprint:
    """Computes the footprint of the model in `folder`.

    `draft_folder`: the folder of `speculation.draft_model`.

    `config` must name the data type. ModelError if a model is not supported, or a file is damaged.
    ConfigError if the configuration asks for something that this model cannot do."""
    architecture = check_small_files(config, folder)
    architecture, weights = _weights_of(config, folder, architecture)
    if not is_quantized(folder):
        check_groups(config, architecture)
    kept = 0 if weights is None else _kept_bytes(config, config.model.quantization, architecture, weights)
    fullest = None if weights is None else _fullest_rank(config, architecture, weights, kept)
    per_layer = _kv_bytes_per_layer(config, architecture, max(map(config.num_ranks, WorkerRole)))
    per_token = architecture.num_layers * per_layer
    block_size = _block_size(config)
    groups = group_layers(architecture.sliding_windows, architecture.max_position_embeddings)
    block_bytes = groups.num_layers * per_layer * block_size
    draft_kept = draft_block_bytes = 0
    if draft_folder is not None:
        draft_kept = _draft_bytes(config, draft_folder)
        draft = read_architecture(draft_folder)
        draft_per_token = draft.num_layers * _kv_bytes_per_layer(config, draft)
        per_token += draft_per_token
        draft_block_bytes = draft_per_token * block_size
        block_bytes += draft_block_bytes
    num_spare = config.speculation.num_spare_blocks(block_size, config.scheduler.max_num_seqs)
    pool = _pool_bytes(config, kept, fullest, block_bytes, num_spare)
    num_tokens, num_blocks = None, config.scheduler.num_blocks
    if pool is not None:  # one block is the null block
        if num_blocks is None:
            # All ranks use as many blocks as rank 0, which also has the draft model's KV.
            other_ranks = max(map(config.num_ranks, WorkerRole)) - 1
            num_blocks = pool // (block_bytes + other_ranks * draft_block_bytes) - num_spare
        num_tokens = max(num_blocks - 1, 0) // groups.groups.num_groups * block_size
    return Footprint(
        weights=weights,
        weight_bytes=kept,
        kv_bytes_per_token=per_token,
        kv_pool_bytes=pool,
        num_kv_tokens=num_tokens,
        frees_early=groups.groups.num_windowed > 0,
        draft_weight_bytes=draft_kept,
        fullest_rank_bytes=fullest,
    )


def _weights_of(
    config: BatonConfig, folder: Path, architecture: ModelArchitecture
) -> tuple[ModelArchitecture, StoredWeights | None]:
    """The weights of a model or draft model, with the architecture that they have."""
    if config.model.load_format == "dummy":
        return architecture, dummy_weights(architecture, BYTES[config.model.dtype])
    architecture = as_stored(architecture, folder)
    return architecture, read_weights(folder, architecture)


def check_small_files(config: BatonConfig, folder: Path) -> ModelArchitecture:
    """Returns the architecture. Raises those errors of `footprint` that depend only on the files beside the
    weights."""
    architecture = read_architecture(folder)
    check_demands(config, architecture)
    check_tokenizer(folder)
    named_eos_token_ids(folder)
    if config.engine.kv_cache_dtype == "fp8":
        check_kv_scales(folder)
    return architecture


def check_room(model: Footprint, config: BatonConfig, name: str | None = None) -> None:
    """ModelError, with the numbers, if model and KV pool do not fit into a worker's memory on this machine.

    `name`: the model's name, if it is not the one in the configuration.
    """
    needed = model.weight_bytes + model.draft_weight_bytes
    needs = f"{_mib(needed)} of weights"
    if config.engine.device == "cuda":
        if (total := gpu_memory()) is None:
            return
        ranks = min(map(config.num_ranks, WorkerRole))
        if model.fullest_rank_bytes is not None:
            needed, needs = model.fullest_rank_bytes, f"{_mib(model.fullest_rank_bytes)} of weights on a rank"
            ranks = 1
        room = int(total * config.engine.gpu_memory_utilization) * ranks
        where = f"{ranks} GPU{'s' if ranks > 1 else ''} of {_mib(total)}"
        remedies = "use more GPUs (--tensor-parallel)"
    else:
        room, where = available_memory(), "the available memory of this machine, or of its container,"
        remedies = "use fewer bits (--quantization int8 or int4) or a smaller --kv-cache-memory-mib"
        assert model.kv_pool_bytes is not None
        needed += model.kv_pool_bytes
        needs += f" and {_mib(model.kv_pool_bytes)} of KV"
    if needed > room:
        raise ModelError(
            f"{name or config.model.path} does not fit: a worker needs {needs}, and {where} has room for {_mib(room)}; "
            f"{remedies}, or a smaller model"
        )


def gpu_memory() -> int | None:
    """Memory of this machine's smallest GPU in bytes; None without a GPU."""
    least = _least_of_gpus("memory.total")
    return None if least is None else int(least) * 2**20


def _multiplies_fp8() -> bool:
    """Whether this machine's GPUs have matrix units for 8-bit floats; True if it has no GPU."""
    least = _least_of_gpus("compute_cap")
    major, minor = FIRST_WITH_FP8
    return least is None or least >= major + minor / 10


def _least_of_gpus(field: str) -> float | None:
    """The smallest value of this field among the GPUs, as nvidia-smi reports it; None without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(float(line) for line in answer.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _kept_bytes(
    config: BatonConfig, quantization: str, architecture: ModelArchitecture, weights: StoredWeights
) -> int:
    """Bytes of the weights in a worker's memory. `quantization` replaces `model.quantization`."""
    return _kept_of_others(config, quantization, weights.others) + vocabulary_bytes(
        weights.embeddings,
        weights.lm_head,
        quantization,
        BYTES[config.model.dtype],
        is_tied=architecture.tie_word_embeddings,
        is_cpu=config.engine.device == "cpu",
        has_kernels=may_have_kernels(os.environ),
    )


def _kept_of_others(config: BatonConfig, quantization: str, weights: StoredWeights) -> int:
    """Bytes in a worker's memory of all weights except the embeddings and the projection to logits.

    A CPU keeps a GGUF file's groups, and keeps 16-bit weights in 16 bits even if the model computes in
    float32. It keeps matrices of a quantized checkpoint in groups, with a scale and at most a minimum per 32 numbers.
    A GPU keeps 8-bit floats.
    """
    is_cpu = config.engine.device == "cpu"
    in_dtype = weights.num_parameters * BYTES[config.model.dtype]
    if is_cpu and quantization != "fp8" and not may_have_kernels(os.environ):
        if quantization in BITS_KEPT:  # without Baton's kernels, torch multiplies groups that are not packed
            return int(weights.num_parameters * bits_in_groups(ROUNDED_GROUP_SIZE) / 8)
        return in_dtype
    if quantization in BITS_KEPT:  # at most this many bits: a matrix that has fewer bits is kept
        at_most = int(weights.num_parameters * BITS_KEPT[quantization] / 8)
        keeps_fewer = is_cpu and quantization != "fp8"
        return min(at_most, _kept_of_others(config, "auto", weights) if keeps_fewer else in_dtype)
    if weights.quantization is not None:
        return _kept_of_checkpoint(config, weights) if quantization == "auto" else in_dtype
    if is_cpu and (quantization == "auto" or not weights.is_gguf):
        return min(weights.num_bytes + _added_by_cuts(config, weights), in_dtype)
    return in_dtype


def _added_by_cuts(config: BatonConfig, weights: StoredWeights) -> int:
    """How many more bytes some matrices of a GGUF file take, because ranks would cut their groups of 32.

    Such matrices get groups of 16, with twice as many scales and minima, or become numbers."""
    added, divisions, number_bytes = 0, _divisions(config), BYTES[config.model.dtype]
    for kind, size in weights.divided.items():
        smallest = min(kind.group_size(n, expert_parallel=whole) for n, whole in divisions)
        if smallest == 1:
            added += max(size.num_parameters * number_bytes - size.num_bytes, 0)
        elif smallest < ROUNDED_GROUP_SIZE:
            added += size.num_parameters // 8
    return added


def _divisions(config: BatonConfig) -> set[tuple[int, bool]]:
    """The number of ranks of both roles, and whether each rank has whole experts."""
    return {(config.num_ranks(role), config.has_expert_parallel(role)) for role in WorkerRole}


def _kept_of_checkpoint(config: BatonConfig, weights: StoredWeights) -> int:
    """Like `_kept_of_others`, for a quantized checkpoint: matrices stay quantized if a kernel supports their
    scheme."""
    is_cpu, number_bytes = config.engine.device == "cpu", BYTES[config.model.dtype]
    multiplies_fp8 = not is_cpu and config.model.dtype != "float32" and _multiplies_fp8()
    divisions = _divisions(config)
    total, rest = 0, Size(weights.num_parameters, weights.num_bytes)
    for kind, size in weights.matrices.items():
        rest = rest.plus(Size(-size.num_parameters, -size.num_bytes))
        numbers = size.num_parameters * number_bytes
        if is_cpu and all(kind.stays_in_groups(n, expert_parallel=whole) for n, whole in divisions):
            total += min(size.num_bytes + size.num_parameters // 8, numbers)
        elif multiplies_fp8 and kind.stays_in_fp8:
            total += min(size.num_bytes, numbers)
        else:
            total += numbers
    plain = rest.num_parameters * number_bytes
    return total + (min(rest.num_bytes, plain) if is_cpu else plain)


def _fullest_rank(
    config: BatonConfig, architecture: ModelArchitecture, weights: StoredWeights, kept: int
) -> int | None:
    """How many of the `kept` bytes are on the rank that has the most bytes; None without expert parallelism.

    Assumes that experts have the same share of the layers' bytes as in the files. Ranks divide everything else
    equally."""
    if not any(map(config.has_expert_parallel, WorkerRole)):
        return None
    num_experts = max(mixture.num_experts for mixture in architecture.mixtures if mixture is not None)
    others = weights.others
    kept_of_others = _kept_of_others(config, config.model.quantization, others)
    of_experts = kept_of_others * others.num_expert_bytes // max(others.num_bytes, 1)
    sizes = []
    for role in WorkerRole:
        num_ranks = config.num_ranks(role)
        if config.has_expert_parallel(role):
            most_experts = -(-num_experts // num_ranks)
            sizes.append((kept - of_experts) // num_ranks + of_experts * most_experts // num_experts)
        else:
            sizes.append(kept // num_ranks)
    return max(sizes)


def _draft_bytes(config: BatonConfig, folder: Path) -> int:
    """Bytes of the draft model's weights in the worker's memory."""
    architecture, weights = _weights_of(config, folder, read_architecture(folder))
    if weights is None:
        return 0
    quantization = config.speculation.draft_quantization or config.model.quantization
    return _kept_bytes(config, quantization, architecture, weights)


def _kv_bytes_per_layer(config: BatonConfig, architecture: ModelArchitecture, num_ranks: int = 1) -> int:
    """Bytes of one token in one layer, on all ranks together."""
    return architecture.kv_numbers(num_ranks) * BYTES[dtype_of(config).of_kv]


def _block_size(config: BatonConfig) -> int:
    scheduler = config.scheduler
    is_default = config.engine.device == "cuda" and "block_size" not in scheduler.model_fields_set
    return GPU_BLOCK_SIZE if is_default else scheduler.block_size


def _pool_bytes(
    config: BatonConfig, weight_bytes: int, fullest_rank: int | None, block_bytes: int, num_spare: int
) -> int | None:
    """Size of the pool, as in engine/capacity.py; approximate on a GPU, since steps are measured later."""
    engine, ranks = config.engine, max(map(config.num_ranks, WorkerRole))
    if config.scheduler.num_blocks is not None:
        return (config.scheduler.num_blocks + num_spare) * block_bytes
    if engine.kv_cache_memory_mib is not None:
        return engine.kv_cache_memory_mib * 2**20 * ranks
    if engine.device == "cpu":
        return CPU_KV_CACHE_MIB * 2**20 * ranks * (2 if dtype_of(config).of_kv == "float32" else 1)
    total = gpu_memory()
    if total is None or not weight_bytes:
        return None
    if fullest_rank is not None:  # all ranks have as many blocks as the rank with the fewest
        weight_bytes = fullest_rank * ranks
    return max(int(total * engine.gpu_memory_utilization) * ranks - weight_bytes, 0)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
