"""footprint: a model's memory on a worker, computed from the headers of its files; imports no torch."""

import os
import subprocess
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import ModelError
from baton.worker import WorkerRole
from engine.allocator import available_memory
from engine.layer_groups import group_layers
from engine.loading.demands import check_demands, check_experts
from engine.loading.dtype import dtype_of
from engine.loading.gguf import GgufType, read_gguf
from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import indexed_files, read_safetensors_header
from engine.loading.vocabulary import (
    ROUNDED_GROUP_SIZE,
    StoredTable,
    bits_in_groups,
    stored_table,
    vocabulary_bytes,
)
from engine.model_config import ModelArchitecture, read_architecture, read_json
from engine.native.compilers import may_have_kernels
from engine.quantization_config import (
    FIRST_WITH_FP8,
    Quantization,
    check_kv_cache_scheme,
    read_quantization,
)

CPU_KV_CACHE_MIB = 1024
"""Size of a CPU's pool for keys and values of 16 or 8 bits. In float32 the pool is twice as large, so that it
has room for as many tokens as with 16 bits."""
BITS_KEPT = {"fp8": 8.0, "int8": 9.0, "int4": 5.0}
"""At most so many bits of a weight by `model.quantization`: 32 weights share a scale and a minimum of 16 bits.
Weights that are rounded to int8 while loading need no minimum."""
GGUF_BITS_KEPT: dict[GgufType, float] = {
    GgufType.F32: 32,
    GgufType.F16: 16,
    GgufType.BF16: 16,
    GgufType.Q4_0: 4.5,
    GgufType.Q4_1: 5,
    GgufType.Q4_K: 5,
    GgufType.Q5_0: 8.5,
    GgufType.Q5_1: 9,
    GgufType.Q5_K: 9,
    GgufType.Q8_0: 8.5,
    GgufType.Q6_K: 9,
}
"""Bits of a weight by its type in a GGUF file, on a CPU: 5 and 6 bits are stored in 8; groups of Q6_K have 16
weights. A group of a type with one value for zero has no minimum."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
EXPERTS = ".experts."
"""Part of the names of tensors of a mixture's experts."""
GPU_BLOCK_SIZE = 64
"""The default of `scheduler.block_size` on a GPU, whose copy engine needs blocks of 64 tokens
(engine/kernels/attention_tuning.py)."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of a folder's files."""

    num_parameters: int
    num_bytes: int
    """Their bytes in the files; for a GGUF file, their bytes in a CPU's memory."""
    is_gguf: bool
    num_expert_bytes: int = 0
    """How many of these bytes belong to a mixture's experts, without shared experts."""
    quantization: Quantization | None = None
    """The quantization of the checkpoint, if it is quantized already."""
    embeddings: StoredTable = field(default_factory=StoredTable)
    lm_head: StoredTable = field(default_factory=StoredTable)
    """Empty if the embeddings are also the projection to logits."""

    @property
    def others(self) -> "StoredWeights":
        """All but embeddings and projection to logits."""
        tables = self.embeddings, self.lm_head
        num_parameters = self.num_parameters - sum(table.num_parameters for table in tables)
        num_bytes = self.num_bytes - sum(table.num_bytes for table in tables)
        empty = StoredTable()
        return replace(
            self, num_parameters=num_parameters, num_bytes=num_bytes, embeddings=empty, lm_head=empty
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one worker.

    Bytes of weights are approximate: norms and biases may have other bits.
    """

    weights: StoredWeights | None
    """None if no weights are read, or if this folder has none."""
    weight_bytes: int
    """Bytes of the weights in the worker's memory; 0 without weights."""
    kv_bytes_per_token: int
    """Bytes on all ranks together; every rank stores the whole latent."""
    kv_pool_bytes: int | None
    """Bytes on all ranks together; None if a worker measures the size at its start, or this machine lacks the
    device."""
    num_kv_tokens: int | None
    """For how many tokens of KV the pool has room; more if `gives_back`."""
    gives_back: bool = False
    """Whether layers with a window free KV that has left the window."""
    draft_weight_bytes: int = 0
    """Bytes of a draft model's weights. Its KV is included in `kv_pool_bytes` and `kv_bytes_per_token`."""
    fullest_rank_bytes: int | None = None
    """Bytes of the weights on the rank with the most, among workers of both roles. None without expert
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
            tokens = f"{'at least ' if self.gives_back else ''}{self.num_kv_tokens:,} tokens"
            parts.append(f"{pool} of KV hold {tokens} on each worker")
        return "; ".join(parts)


def footprint(config: BatonConfig, folder: Path, draft_folder: Path | None = None) -> Footprint:
    """Computes the footprint of the model in `folder`.

    `draft_folder`: the folder of `speculation.draft_model`.

    `config` must name the data type. ModelError if a model is not supported, or a file is damaged.
    ConfigError if the configuration asks for something that this model cannot do."""
    architecture = read_architecture(folder)
    check_demands(config, architecture)
    if config.engine.kv_cache_dtype == "fp8":
        check_kv_cache_scheme(read_json(folder / "config.json"))
    is_read = config.model.load_format == "auto"
    weights = _read_weights(folder, architecture) if is_read else None
    kept = 0 if weights is None else _kept_bytes(config, architecture, weights)
    fullest = None if weights is None else _fullest_rank(config, architecture, weights, kept)
    per_layer = _kv_bytes_per_layer(config, architecture, max(map(config.num_ranks, WorkerRole)))
    per_token = architecture.num_layers * per_layer
    block_size = _block_size(config)
    groups = group_layers(architecture.sliding_windows, architecture.max_position_embeddings)
    block_bytes = groups.num_layers * per_layer * block_size
    draft_kept = 0
    if draft_folder is not None:
        draft_kept = _draft_bytes(config, draft_folder)
        draft = read_architecture(draft_folder)
        draft_per_token = draft.num_layers * _kv_bytes_per_layer(config, draft)
        per_token += draft_per_token
        block_bytes += draft_per_token * block_size
    num_spare = config.speculation.num_spare_blocks(block_size, config.scheduler.max_num_seqs)
    pool = _pool_bytes(config, kept, fullest, block_bytes, num_spare)
    num_tokens = None
    if pool is not None:  # one block is the null block
        num_blocks = pool // block_bytes - num_spare
        num_tokens = max(num_blocks - 1, 0) // groups.groups.num_groups * block_size
    gives_back = groups.groups.num_windowed > 0
    return Footprint(weights, kept, per_token, pool, num_tokens, gives_back, draft_kept, fullest)


def check_room(takes: Footprint, config: BatonConfig, name: str | None = None) -> None:
    """ModelError, with the numbers, if model and KV pool do not fit into a worker's memory on this machine.

    `name`: the model's name, if it is not the one in the configuration.
    """
    needed = takes.weight_bytes + takes.draft_weight_bytes
    needs = f"{_mib(needed)} of weights"
    if config.engine.device == "cuda":
        if (total := gpu_memory()) is None:
            return
        ranks = min(map(config.num_ranks, WorkerRole))
        if takes.fullest_rank_bytes is not None:
            needed, needs = takes.fullest_rank_bytes, f"{_mib(takes.fullest_rank_bytes)} of weights on a rank"
            ranks = 1
        room = int(total * config.engine.gpu_memory_utilization) * ranks
        where = f"{ranks} GPU{'s' if ranks > 1 else ''} of {_mib(total)}"
        remedies = "use more GPUs (--tensor-parallel)"
    else:
        room, where = available_memory(), "this machine's available memory"
        remedies = "use fewer bits (--quantization int8 or int4) or a smaller --kv-cache-memory-mib"
        assert takes.kv_pool_bytes is not None
        needed += takes.kv_pool_bytes
        needs += f" and {_mib(takes.kv_pool_bytes)} of KV"
    if needed > room:
        raise ModelError(
            f"{name or config.model.path} does not fit: a worker needs {needs}, and {where} has room for {_mib(room)}; "
            f"{remedies}, or a smaller model"
        )


def _read_weights(folder: Path, architecture: ModelArchitecture) -> StoredWeights | None:
    """The tensors of a folder that the model reads."""
    copies = ("lm_head.",) if architecture.tie_word_embeddings else ()
    return stored_weights(folder, (*architecture.unread_tensors, *copies))


def stored_weights(folder: Path, unread: tuple[str, ...] = ()) -> StoredWeights | None:
    """The tensors of a folder; None if it lacks some weights. ModelError if a file is damaged.

    `unread`: prefixes of the names of tensors that do not count.
    """
    if (gguf := gguf_of(folder)) is not None:
        of_name = {
            name: _gguf_table(prod(tensor.shape), tensor.type)
            for name, tensor in read_gguf(gguf).tensors.items()
        }
        tables = of_name.values()
        return StoredWeights(
            sum(table.num_parameters for table in tables),
            sum(table.num_bytes for table in tables),
            True,
            embeddings=of_name.get("token_embd.weight", StoredTable()),
            lm_head=of_name.get("output.weight", StoredTable()),
        )
    files = [folder / name for name in indexed_files(folder)]
    if not all(file.is_file() for file in files):
        return None
    tensors = [entry for file in files for entry in read_safetensors_header(file).tensors.items()]
    entries = [(name, entry) for name, entry in tensors if not name.startswith(unread)]
    check_experts(read_architecture(folder), (name for name, _ in entries))
    bytes_of = [(name, entry["data_offsets"][1] - entry["data_offsets"][0]) for name, entry in entries]
    num_expert_bytes = sum(size for name, size in bytes_of if EXPERTS in name)
    quantization = read_quantization(read_json(folder / "config.json"))
    sizes = [(name, prod(entry["shape"])) for name, entry in entries]
    counts = [
        size if quantization is None else quantization.num_parameters(name, size) for name, size in sizes
    ]
    num_bytes = sum(size for _, size in bytes_of)
    counted = {name: (count, size) for (name, size), count in zip(bytes_of, counts, strict=True)}
    embeddings, lm_head = (
        stored_table(each, counted, quantization) for each in ("model.embed_tokens", "lm_head")
    )
    return StoredWeights(sum(counts), num_bytes, False, num_expert_bytes, quantization, embeddings, lm_head)


def _gguf_table(num_parameters: int, kind: GgufType) -> StoredTable:
    """A tensor of a GGUF file."""
    bits = GGUF_BITS_KEPT[kind]
    num_bytes = int(num_parameters * bits / 8)
    group_size = 16 if kind is GgufType.Q6_K else 32
    return StoredTable(num_parameters, num_bytes, num_bytes, None if bits >= 16 else group_size)


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


def _kept_bytes(config: BatonConfig, architecture: ModelArchitecture, weights: StoredWeights) -> int:
    """Bytes of the weights in a worker's memory."""
    return _kept_of_others(config, weights.others) + vocabulary_bytes(
        weights.embeddings,
        weights.lm_head,
        config.model.quantization,
        BYTES[config.model.dtype],
        is_tied=architecture.tie_word_embeddings,
        is_cpu=config.engine.device == "cpu",
        has_kernels=may_have_kernels(os.environ),
    )


def _kept_of_others(config: BatonConfig, weights: StoredWeights) -> int:
    """Bytes of the weights without embeddings and projection to logits in a worker's memory.

    A CPU keeps a GGUF file's groups, and keeps 16-bit weights in 16 bits even if the model computes in
    float32. It keeps matrices of a quantized checkpoint in groups, with a scale and at most a minimum per 32 numbers.
    A GPU keeps 8-bit floats.
    """
    is_cpu, quantization = config.engine.device == "cpu", config.model.quantization
    in_dtype = weights.num_parameters * BYTES[config.model.dtype]
    if is_cpu and quantization != "fp8" and not may_have_kernels(os.environ):
        if quantization in BITS_KEPT:  # torch alone multiplies groups as they are
            return int(weights.num_parameters * bits_in_groups(ROUNDED_GROUP_SIZE) / 8)
        return in_dtype
    if quantization in BITS_KEPT:  # at most this many bits: a matrix that has fewer bits is kept
        auto = config.model_copy(update={"model": config.model.with_values("model", quantization="auto")})
        at_most = int(weights.num_parameters * BITS_KEPT[quantization] / 8)
        return min(at_most, _kept_of_others(auto, weights) if is_cpu and quantization != "fp8" else in_dtype)
    if weights.quantization is not None:
        schemes = [scheme for _, scheme in weights.quantization.schemes] if quantization == "auto" else []
        if is_cpu and any(scheme.can_stay_in_groups for scheme in schemes):
            return min(weights.num_bytes + weights.num_parameters // 8, in_dtype)
        stays = (
            not is_cpu
            and config.model.dtype != "float32"
            and _multiplies_fp8()
            and any(scheme.can_stay_in_fp8 for scheme in schemes)
        )
        return min(weights.num_bytes, in_dtype) if stays else in_dtype
    if is_cpu and (quantization == "auto" or not weights.is_gguf):
        return min(weights.num_bytes, in_dtype)
    return in_dtype


def _fullest_rank(
    config: BatonConfig, architecture: ModelArchitecture, weights: StoredWeights, kept: int
) -> int | None:
    """The bytes on the rank with the most of `kept` bytes; None without expert parallelism.

    Experts have the same share of the layers' bytes as in the files. Ranks divide everything else equally."""
    if not any(map(config.has_expert_parallel, WorkerRole)):
        return None
    num_experts = max(mixture.num_experts for mixture in architecture.mixtures if mixture is not None)
    others = weights.others
    of_experts = _kept_of_others(config, others) * others.num_expert_bytes // max(others.num_bytes, 1)
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
    if config.model.load_format != "auto":
        return 0
    architecture = read_architecture(folder)
    if (weights := _read_weights(folder, architecture)) is None:
        return 0
    quantization = config.speculation.draft_quantization or config.model.quantization
    model = config.model.with_values("speculation", quantization=quantization)
    return _kept_bytes(config.model_copy(update={"model": model}), architecture, weights)


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
