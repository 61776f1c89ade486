"""kept_bits: in how many bits a model's matrices stay in memory, by its files; reads no weights."""

from collections import Counter
from math import prod
from pathlib import Path

from engine.loading.gguf import read_gguf
from engine.loading.gguf_blocks import bits_of
from engine.loading.gguf_folder import gguf_of
from engine.model_config import read_json
from engine.quantization_config import read_quantization

BITS_OF_FLOATS = 16
"""Of float32, too: a CPU keeps such weights in 16 bits if these are exact, as in most checkpoints."""
ROUNDED: dict[str | None, int] = {None: BITS_OF_FLOATS, "fp8": 8, "int8": 8, "int4": 4}


def kept_bits(kept_as: str | None, folder: Path) -> int:
    """The bits of most weights. `kept_as`: how matrices are stored in memory, see `LoadedModel.quantization`."""
    if kept_as in ROUNDED:
        return ROUNDED[kept_as]
    if (file := gguf_of(folder)) is not None:
        num_weights = Counter[int]()
        for tensor in read_gguf(file).tensors.values():
            num_weights[bits_of(tensor.type) or BITS_OF_FLOATS] += prod(tensor.shape)
        return num_weights.most_common(1)[0][0]
    quantization = read_quantization(read_json(folder / "config.json"))
    assert quantization is not None, f"{folder} is not quantized"
    return max(scheme.bits for _, scheme in quantization.schemes)
