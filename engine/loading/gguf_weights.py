"""GgufWeights: a GGUF file's tensors by their Hugging Face names, memory-mapped; knows no architecture.

In a file, one tensor has a matrix, such as `ffn_up`, of all experts of a layer. This module names each expert's part
as if it were a tensor of its own: `blk.3.ffn_up_exps.7.weight` is a part of `blk.3.ffn_up_exps.weight`. Older files of
Mixtral already have a tensor for each expert, such as `blk.3.ffn_up.7.weight`.
gpt-oss has one projection with gates and ups in turns; its GGUF files have a tensor of gates and one of ups.

llama.cpp rotates pairs of neighbouring numbers of a head; Hugging Face rotates pairs of numbers half a head
apart. So llama.cpp's converter reorders the outputs of q and k in models of some architectures, such as `llama`.
This module restores the original order.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from baton.errors import ModelError
from engine.layers.backend import Matrix
from engine.layers.grouped_weight import GroupedWeight
from engine.loading.gguf import GgufTensor, gguf_layers, read_gguf
from engine.loading.gguf_blocks import matrix_of
from engine.loading.weights import FileWeights, OnLoaded, Shard, Take
from engine.quantization_scheme import SMALLEST_GROUP

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
"""A Hugging Face name, without the layer and without `.weight` or `.bias` -> its name in GGUF files."""
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES_OF = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
"""Names that differ in some architectures."""
_NORMS_FROM_ZERO = ("gemma2", "gemma3")
"""Architectures for which the converter adds 1 to the weights of norms; transformers adds this 1 when it
computes."""
STACKS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""An expert's matrix -> the tensor with this matrix of all experts."""
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
"""The tensor of one expert in older files."""
_INTERLEAVED = re.compile(r"(.+\.mlp\.experts\.\d+\.)gate_up_proj(\..+)")
"""The names of gpt-oss's projections of an expert to gates and ups in turns."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_REORDERED = ("attn_q", "attn_k")
_PERMUTED = ("llama", "smollm3", "granite")
"""Architectures for which the converter reorders the outputs of the matrices in `_REORDERED`."""
_NO_WEIGHT = {"phi3": ("rope_factors_long.weight", "rope_factors_short.weight")}
_NO_WEIGHT_ELSEWHERE = ("rope_freqs.weight",)
"""Tensors that describe the architecture; see `gguf_folder` and `gguf_families`."""


def gguf_name(name: str, architecture: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`; for an expert's tensor, the name of its part."""
    if name.endswith(".sinks"):  # as the converter does
        name = f"{name}.weight"
    stem, _, kind = name.rpartition(".")
    match = _LAYER.fullmatch(stem)
    prefix, stem = (f"blk.{match[1]}.", match[2]) if match else ("", stem)
    if kind == "e_score_correction_bias":
        return f"{prefix}exp_probs_b.bias"
    if expert := _EXPERT.fullmatch(stem):
        return f"{prefix}{STACKS[expert[2]]}.{expert[1]}.{kind}"
    return f"{prefix}{(_NAMES | _NAMES_OF.get(architecture, {}))[stem]}.{kind}"


class GgufWeights(FileWeights):
    """The weights in a GGUF file."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        head_dim: int,
        *,
        keeps_groups: bool,
        takes: Sequence[Take] = (),
        on_progress: OnLoaded | None = None,
    ) -> None:
        """`keeps_groups`: matrices stay quantized, in 4 or 8 bits on the CPU; else they become numbers of `dtype`.

        `takes`: the known future requests; ModelError if one of these tensors is missing or has another
        shape.
        """
        self._file = read_gguf(path)
        self._architecture = self._file.need("general.architecture", str)
        self._tensors = dict(_parts(self._file.tensors))
        names = {self._find(part)[0] for take in takes for part in _takes_of(take)}
        self._bytes = _mapped(path)
        self._dtype = dtype
        self._device = device
        self._head_dim = head_dim
        self._is_reordered = self._architecture in _PERMUTED
        self._keeps_groups = keeps_groups
        self._taken: set[str] = set()
        self._on_progress = on_progress
        self._loaded_bytes = 0
        self._total_bytes = sum(self._tensors[name].num_bytes for name in names)

    def close(self) -> None:
        """Does nothing: the file stays mapped as long as a tensor uses its bytes."""

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        takes = _takes_of(Take(name, shape, shard))
        parts = [self._vector(take) if len(shape) == 1 else _floats(self._matrix(take)) for take in takes]
        return _in_turns(parts).to(self._device, self._dtype)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        take = Take(name, shape, None)
        found = self._vector(take) if len(shape) == 1 else _floats(self._matrix(take))
        return found.to(self._device, torch.float32)

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        matrix = self._matrix(Take(name, (num_outputs, num_inputs), shard))
        if self._keeps_groups and isinstance(matrix, GroupedWeight) and matrix.can_be_kept:
            return matrix
        return _floats(matrix).to(self._device, self._dtype)

    def take_interleaved(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> tuple[Matrix, Matrix]:
        gate, up = _takes_of(Take(name, (num_outputs, num_inputs), shard))
        first, second = (self.take_matrix(take.name, *take.shape, shard=take.shard) for take in (gate, up))
        return first, second

    def check_all_taken(
        self,
        *,
        allowed: tuple[str, ...] = (),  # noqa: ARG002
        unread: tuple[str, ...] = (),
        elsewhere: Iterable[Take] = (),
    ) -> None:
        """ModelError if the file has tensors that were requested neither here nor `elsewhere`. Those of `unread` layers
        are exceptions."""
        of_others = {
            gguf_name(part.name, self._architecture) for take in elsewhere for part in _takes_of(take)
        }
        no_weights = _NO_WEIGHT.get(self._architecture, _NO_WEIGHT_ELSEWHERE)
        found = self._tensors.keys() - self._taken - of_others - {*no_weights}
        unexpected = sorted(name for name in found if not name.startswith(gguf_layers(unread)))
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise ModelError(
                f"{self._file.path}: {len(unexpected)} tensors do not belong to the architecture of the file's "
                f"metadata: {shown}"
            )

    def _vector(self, take: Take) -> torch.Tensor:
        tensor = self._taken_tensor(take)
        vector = _floats(matrix_of(tensor.type, self._rows(tensor))).flatten()
        if self._is_reordered and _kind(tensor) in _REORDERED:
            vector = vector[self._order(len(vector))]
        if self._architecture in _NORMS_FROM_ZERO and _kind(tensor).endswith("_norm"):
            vector = vector - 1.0
        return vector if take.shard is None else vector[take.shard.slice_of(take.name, take.shape)]

    def _matrix(self, take: Take) -> Matrix:
        """The requested part of the matrix, as it is stored."""
        tensor = self._taken_tensor(take)
        rows_OB = self._rows(tensor)
        if self._is_reordered and _kind(tensor) in _REORDERED:
            rows_OB = rows_OB[self._order(len(rows_OB))]
        shard = take.shard
        if shard is not None and shard.dim == 0:
            rows_OB = rows_OB[shard.slice_of(take.name, take.shape)]
        matrix = matrix_of(tensor.type, rows_OB)
        if shard is None or shard.dim == 0:
            return matrix
        inputs = shard.slice_of(take.name, take.shape)
        if isinstance(matrix, torch.Tensor):
            return matrix[:, inputs]
        for size in (matrix.group_size, SMALLEST_GROUP):
            if inputs.start % size == 0 and inputs.stop % size == 0:
                return matrix.in_groups_of(size).inputs(inputs)
        return matrix.dequantized()[:, inputs]  # no whole groups: the same values, but plain numbers

    def _rows(self, tensor: GgufTensor) -> torch.Tensor:
        """The tensor's bytes; a vector is one row."""
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].view(-1, tensor.row_bytes)

    def _order(self, num_outputs: int) -> torch.Tensor:
        """Indices that restore the outputs' order: of each head first the even outputs, then the odd ones."""
        return torch.arange(num_outputs).view(-1, self._head_dim // 2, 2).transpose(1, 2).flatten()

    def _taken_tensor(self, take: Take) -> GgufTensor:
        name, tensor = self._find(take)
        if name not in self._taken:  # parts of merged projections are taken one by one
            self._loaded_bytes += tensor.num_bytes
        self._taken.add(name)
        if self._on_progress is not None:
            self._on_progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def _find(self, take: Take) -> tuple[str, GgufTensor]:
        """The requested tensor and its name; ModelError if it is missing or has another shape."""
        name = gguf_name(take.name, self._architecture)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._file.path}: tensor {name} (shape {list(take.shape)}) is missing")
        if tensor.shape != take.shape:
            raise ModelError(
                f"{self._file.path}: tensor {name} has shape {list(tensor.shape)}, but the metadata implies "
                f"{list(take.shape)}"
            )
        return name, tensor


def _parts(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Every tensor by its name, or each expert's part of it."""
    for name, tensor in tensors.items():
        if match := _ONE_EXPERT.fullmatch(name):
            yield f"{match[1]}_exps.{match[2]}.weight", tensor
            continue
        stem, _, suffix = name.rpartition(".")
        if _kind(tensor) not in STACKS.values() or len(tensor.shape) != (2 if suffix == "bias" else 3):
            yield name, tensor
            continue
        for number in range(tensor.shape[0]):
            yield f"{stem}.{number}.{suffix}", tensor.part(number)


def _takes_of(take: Take) -> tuple[Take, ...]:
    """The request itself; for gates and ups in turns, one request for the gates and one for the ups."""
    match = _INTERLEAVED.fullmatch(take.name)
    if match is None:
        return (take,)
    shard, shape = take.shard, (take.shape[0] // 2, *take.shape[1:])
    if shard is not None and shard.dim == 0:
        part = shard.slice_of(take.name, take.shape)
        assert part.start % 2 == part.stop % 2 == 0, f"{part} of {take.name}"
        shard = Shard(0, first=part.start // 2, size=(part.stop - part.start) // 2)
    return tuple(Take(f"{match[1]}{name}_proj{match[2]}", shape, shard) for name in ("gate", "up"))


def _in_turns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first output of each part, then the second of each, and so on."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), 1).flatten(0, 1)


def _mapped(path: Path) -> torch.Tensor:
    """The file's bytes. The mapping is private, so the system may refuse a file larger than free memory."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot map {path} into memory: {error}") from error


def _kind(tensor: GgufTensor) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`; empty if the name has no dots."""
    return tensor.name.rpartition(".")[0].rpartition(".")[2]


def _floats(matrix: Matrix) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized()
