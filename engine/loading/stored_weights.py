"""StoredWeights: the sizes of the tensors in a folder's files, by their headers; imports no torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from engine.loading.demands import check_experts
from engine.loading.gguf import GgufType, gguf_layers, read_gguf
from engine.loading.gguf_folder import EXPERTS as GGUF_EXPERTS
from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import TensorEntry, indexed_files, stored_tensors
from engine.loading.vocabulary import ROUNDED_GROUP_SIZE, StoredTable
from engine.model_config import ModelArchitecture, read_json
from engine.quantization_config import Quantization, read_quantization
from engine.quantization_scheme import SMALLEST_GROUP, Scheme

BITS_OF_FLOATS = 16
"""The bits of a weight that is not quantized, even if it is a float32: a CPU keeps it in 16 bits if these represent
it exactly, as in most checkpoints."""
ROUNDED: dict[str | None, int] = {None: BITS_OF_FLOATS, "fp8": 8, "int8": 8, "int4": 4}
EXPERTS = ".experts."
"""Part of the names of tensors of a mixture's experts in safetensors files."""
_TABLES = ("model.embed_tokens", "lm_head")
_STACK = re.compile(r"(\.experts\.(?:gate_up|down)_proj)_(blocks|scales|bias)$")
"""The end of the name of a tensor that contains all experts of a layer."""
_DIVIDED = ("o_proj", "down_proj", "w2")
"""The matrices whose inputs ranks divide among themselves."""
_GGUF_DIVIDED = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
"""The names of the same matrices in GGUF files."""
_ALWAYS_NUMBERS = ("kv_b_proj",)
"""The matrices that become numbers of `model.dtype` in any quantization."""


class Size(NamedTuple):
    num_parameters: int
    num_bytes: int

    def plus(self, other: "Size") -> "Size":
        return Size(self.num_parameters + other.num_parameters, self.num_bytes + other.num_bytes)


_NOTHING = Size(0, 0)


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """Quantized matrices that either all stay quantized, or all become numbers."""

    scheme: Scheme | None
    """How they are stored; None: they become numbers in any case."""
    num_inputs: int
    are_inputs_divided: bool
    """Whether ranks divide the inputs among themselves."""
    is_of_experts: bool

    def stays_in_groups(self, num_ranks: int, *, expert_parallel: bool = False) -> bool:
        """Whether a CPU keeps these matrices in groups. `expert_parallel`: ranks have whole experts."""
        divides = self.are_inputs_divided and not (self.is_of_experts and expert_parallel)
        return self.scheme is not None and self.scheme.stays_in_groups(
            self.num_inputs, num_ranks if divides else 1
        )

    @property
    def stays_in_fp8(self) -> bool:
        return self.scheme is not None and self.scheme.can_stay_in_fp8


class DividedInputs(NamedTuple):
    """Matrices whose `num_inputs` inputs ranks divide among themselves."""

    num_inputs: int
    are_of_experts: bool

    def group_size(self, num_ranks: int, *, expert_parallel: bool) -> int:
        """The size of the largest groups of a rank's inputs that a CPU can keep; 1 if it can keep none.

        `expert_parallel`: ranks have whole experts."""
        own = self.num_inputs // (1 if self.are_of_experts and expert_parallel else num_ranks)
        return next((size for size in (ROUNDED_GROUP_SIZE, SMALLEST_GROUP) if own % size == 0), 1)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of a folder's files."""

    num_parameters: int
    num_bytes: int
    """The bytes of the tensors in the files; for a GGUF file, their bytes in a CPU's memory."""
    is_gguf: bool
    num_expert_bytes: int = 0
    """How many of these bytes belong to a mixture's experts, without shared experts."""
    quantization: Quantization | None = None
    """The quantization of the checkpoint, if it is quantized already."""
    matrices: Mapping[MatrixKind, Size] = field(default_factory=dict)
    """The quantized matrices, without embeddings and projection to logits."""
    divided: Mapping["DividedInputs", Size] = field(default_factory=dict)
    """The matrices of a GGUF file that are in groups, and whose inputs ranks divide among themselves."""
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


def read_weights(folder: Path, architecture: ModelArchitecture) -> StoredWeights | None:
    """The tensors of a folder that the model reads; None if the folder lacks some weights.

    ModelError if a file is damaged.
    """
    if (gguf := gguf_of(folder)) is not None:
        return _read_gguf(gguf, architecture)
    if not all((folder / name).is_file() for name in indexed_files(folder)):
        return None
    copies = ("lm_head.",) if architecture.tie_word_embeddings else ()
    unread = (*architecture.unread_tensors, *copies)
    tensors = {name: entry for name, entry in stored_tensors(folder).items() if not name.startswith(unread)}
    check_experts(architecture, tensors)
    quantization = quantization_of(folder)
    modules = _modules(tensors, quantization)
    kinds: dict[MatrixKind, Size] = {}
    for name, module in modules.items():
        if module.kind is not None and name not in _TABLES:
            kinds[module.kind] = kinds.get(module.kind, _NOTHING).plus(module.size)
    embeddings, lm_head = (_table(modules.get(name)) for name in _TABLES)
    return StoredWeights(
        num_parameters=sum(module.size.num_parameters for module in modules.values()),
        num_bytes=sum(module.size.num_bytes for module in modules.values()),
        is_gguf=False,
        num_expert_bytes=sum(entry.num_bytes for name, entry in tensors.items() if EXPERTS in name),
        quantization=quantization,
        matrices=kinds,
        embeddings=embeddings,
        lm_head=lm_head,
    )


def dummy_weights(architecture: ModelArchitecture, number_bytes: int) -> StoredWeights:
    """The tensors that `load_format: dummy` makes, without norms and biases. `number_bytes`: the bytes of a number."""
    a = architecture
    of_experts = (
        sum(3 * m.num_experts * m.intermediate_size for m in a.mixtures if m is not None) * a.hidden_size
    )
    of_chosen = (
        sum(3 * m.num_chosen * m.intermediate_size for m in a.mixtures if m is not None) * a.hidden_size
    )
    of_routers = sum(m.num_experts for m in a.mixtures if m is not None) * a.hidden_size
    in_table = a.vocab_size * a.hidden_size
    table = StoredTable(in_table, in_table * number_bytes, in_table * number_bytes)
    num_tables = 1 if a.tie_word_embeddings else 2
    count = a.weights_per_token - of_chosen + of_experts + of_routers + num_tables * in_table
    return StoredWeights(
        num_parameters=count,
        num_bytes=count * number_bytes,
        is_gguf=False,
        num_expert_bytes=of_experts * number_bytes,
        embeddings=table,
        lm_head=StoredTable() if a.tie_word_embeddings else table,
    )


def quantization_of(folder: Path) -> Quantization | None:
    """The quantization that a folder's config.json declares, or None; see `read_quantization`."""
    return read_quantization(read_json(folder / "config.json"))


def is_quantized(folder: Path) -> bool:
    """Whether a folder's matrices may be quantized already."""
    return gguf_of(folder) is not None or quantization_of(folder) is not None


def keeps_bits(folder: Path, quantization: Quantization, *, in_groups: bool, in_fp8: bool) -> bool:
    """Whether any matrix of a checkpoint stays quantized on a device that keeps groups or 8-bit floats.

    The number of ranks does not matter: ranks divide the inputs of only a few matrices.
    """
    modules = _modules(stored_tensors(folder), quantization)
    return any(
        (in_groups and kind.stays_in_groups(1)) or (in_fp8 and kind.stays_in_fp8)
        for kind in {module.kind for module in modules.values()}
        if kind is not None
    )


def kept_bits(kept_as: str | None, folder: Path) -> int:
    """The number of bits in which most weights are stored in memory.

    `kept_as`: how matrices are stored in memory, see `LoadedModel.quantization`.
    """
    if kept_as in ROUNDED:
        return ROUNDED[kept_as]
    if (file := gguf_of(folder)) is not None:
        num_weights = Counter[int]()
        for tensor in read_gguf(file).tensors.values():
            num_weights[tensor.type.kept_bits or BITS_OF_FLOATS] += prod(tensor.shape)
        return num_weights.most_common(1)[0][0]
    quantization = quantization_of(folder)
    assert quantization is not None, f"{folder} is not quantized"
    return max(scheme.bits for _, scheme in quantization.schemes)


class _Module(NamedTuple):
    """The tensors with the same name before the last dot: a matrix with its scales and bias, or a vector."""

    size: Size
    kind: MatrixKind | None
    """The kind of a quantized matrix; None: plain numbers."""


def _modules(tensors: Mapping[str, TensorEntry], quantization: Quantization | None) -> dict[str, _Module]:
    parts: defaultdict[str, dict[str, TensorEntry]] = defaultdict(dict)
    sizes: dict[str, Size] = {}
    for name, entry in tensors.items():
        module, _, part = _STACK.sub(r"\1.\2", name).rpartition(".")
        parts[module][part] = entry
        count = (
            entry.num_values if quantization is None else quantization.num_parameters(name, entry.num_values)
        )
        sizes[module] = sizes.get(module, _NOTHING).plus(Size(count, entry.num_bytes))
    return {name: _Module(size, _kind(name, parts[name], quantization)) for name, size in sizes.items()}


def _kind(
    module: str, parts: Mapping[str, TensorEntry], quantization: Quantization | None
) -> MatrixKind | None:
    scheme = None if quantization is None else quantization.scheme_of(module)
    if scheme is None or scheme.values_name not in parts or not parts.keys() & set(scheme.marks):
        return None
    shape, name = parts[scheme.values_name].shape, module.rpartition(".")[2]
    if len(shape) < 2:
        return None
    is_of_experts = EXPERTS in module
    return MatrixKind(
        None if name in _ALWAYS_NUMBERS else scheme, scheme.num_inputs(shape), name in _DIVIDED, is_of_experts
    )


def _table(module: _Module | None) -> StoredTable:
    """The embeddings, or the projection to logits, in safetensors files."""
    if module is None:
        return StoredTable()
    num_parameters, num_bytes = module.size
    if module.kind is None:
        return StoredTable(num_parameters, num_bytes, num_bytes)
    if module.kind.stays_in_groups(1):
        return StoredTable(num_parameters, num_bytes, num_bytes + num_parameters // 8, ROUNDED_GROUP_SIZE)
    return StoredTable(num_parameters, num_bytes, 4 * num_parameters)  # becomes numbers of `model.dtype`


def _read_gguf(file: Path, architecture: ModelArchitecture) -> StoredWeights:
    unread = gguf_layers(architecture.unread_tensors)
    tensors = {name: each for name, each in read_gguf(file).tensors.items() if not name.startswith(unread)}
    tables = {name: _gguf_table(prod(tensor.shape), tensor.type) for name, tensor in tensors.items()}
    divided: dict[DividedInputs, Size] = {}
    for name, tensor in tensors.items():
        of_experts = GGUF_EXPERTS.search(name)
        stem = name.removesuffix(".weight")
        if of_experts is not None and of_experts[1] is not None:
            stem = stem.removesuffix(f".{of_experts[1]}")
        if stem.rpartition(".")[2] in _GGUF_DIVIDED and tensor.type.kept_bits is not None:
            kind, table = DividedInputs(tensor.shape[-1], of_experts is not None), tables[name]
            size = Size(table.num_parameters, table.num_bytes)
            divided[kind] = divided.get(kind, _NOTHING).plus(size)
    return StoredWeights(
        num_parameters=sum(table.num_parameters for table in tables.values()),
        num_bytes=sum(table.num_bytes for table in tables.values()),
        is_gguf=True,
        num_expert_bytes=sum(table.num_bytes for name, table in tables.items() if GGUF_EXPERTS.search(name)),
        divided=divided,
        embeddings=tables.get("token_embd.weight", StoredTable()),
        lm_head=tables.get("output.weight", StoredTable()),
    )


def _gguf_table(num_parameters: int, kind: GgufType) -> StoredTable:
    """A tensor of a GGUF file."""
    num_bytes = int(num_parameters * kind.memory_bits / 8)
    group_size = None if kind.kept_bits is None else kind.group_size
    return StoredTable(num_parameters, num_bytes, num_bytes, group_size)
