"""Times a model's matrix products on a CPU: our own kernels, torch's operators, and the limit by memory bandwidth.

    python -m benchmarks.cpu_products [--rows 1,8,32,256] [--threads 2] [--seconds 2] [--json PATH]

The products are those of all linear layers of SmolLM2-135M and of the projection to logits. Each layer has
its own weights, so that all weights are read from memory, as in a step of the engine. Sides take turns, and
the shortest time of each side counts, since other work on the machine only adds time. With one thread, the
time is the thread's own processor time. `floor` is the time to read the weights at the bandwidth that a sum
over as many bytes reaches. Many rows cannot reach `floor`, since the products take time, too.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from benchmarks.json_file import save_json
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.linear import Linear
from engine.layers.native_linear import NativeLinear
from engine.native.instructions import cpu_flags, machine_instructions
from engine.native.library import native_library
from engine.native.products import Products

NUM_LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of the four matrices of a decoder layer: query, key and value; output; gate and up; down."""
LOGITS_SHAPE = (49_152, 576)
GROUP_SIZE = 32
OURS = "ours"

Product = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Side:
    """One way to multiply by weights of one kind."""

    weights: str
    name: str
    dtype: torch.dtype
    """Data type of the activations."""
    make: Callable[[torch.Tensor], Product]
    """Makes the product from a float32 weight."""


@dataclass(frozen=True, slots=True)
class Figure:
    weights: str
    side: str
    rows: int
    milliseconds: float
    floor_milliseconds: float


def sides(products: Products) -> Iterator[Side]:
    """All sides. For each kind of weights, our own side is the first."""
    float32, bfloat16 = torch.float32, torch.bfloat16

    def ours(weight_OI: torch.Tensor) -> Product:
        return NativeLinear.of_floats(products, weight_OI, None)

    def grouped(weight_OI: torch.Tensor, bits: Literal[4, 8]) -> Product:
        return NativeLinear.of_groups(products, GroupedWeight.quantize(weight_OI, bits, GROUP_SIZE), None)

    def short(weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI.to(bfloat16)

    yield Side("fp32", OURS, float32, ours)
    yield Side("fp32", "torch, packed", float32, Linear)
    yield Side("fp32", "torch", float32, lambda w: lambda x: F.linear(x, w))
    yield Side("bf16 in fp32", OURS, float32, lambda w: ours(short(w).to(float32)))
    yield Side("bf16", OURS, bfloat16, lambda w: ours(short(w)))
    yield Side("bf16", "torch, packed", bfloat16, lambda w: Linear(short(w)))
    yield Side("int8", OURS, float32, lambda w: grouped(w, 8))
    yield Side("int4", OURS, float32, lambda w: grouped(w, 4))
    yield Side("int8", "torch, int8pack", bfloat16, _int8pack)
    if (
        "avx512_vnni" in cpu_flags() or "avx_vnni" in cpu_flags()
    ):  # elsewhere oneDNN's sums of two products overflow
        yield Side("int8", "oneDNN, 8-bit activations", float32, _onednn)
    yield Side("int4", "torch, int4pack", bfloat16, _int4pack)


def _int8pack(weight_OI: torch.Tensor) -> Product:
    scales_O = weight_OI.abs().amax(-1) / 127
    values_OI = (weight_OI / scales_O.unsqueeze(-1)).round().to(torch.int8)
    short_scales_O = scales_O.to(torch.bfloat16)
    return lambda x_TI: torch._weight_int8pack_mm(x_TI, values_OI, short_scales_O)


def _int4pack(weight_OI: torch.Tensor) -> Product:
    grouped = GroupedWeight.quantize(weight_OI, 4, GROUP_SIZE)
    packed = torch._convert_weight_to_int4pack_for_cpu(grouped.values_OI.to(torch.int32), 2)
    # The operator's weight is (value - 8) x scale + zero.
    zeros_OG = grouped.mins_OG + 8 * grouped.scales_OG
    scales_GO2 = torch.stack([grouped.scales_OG.t(), zeros_OG.t()], -1).to(torch.bfloat16).contiguous()
    return lambda x_TI: torch._weight_int4pack_mm_for_cpu(x_TI, packed, GROUP_SIZE, scales_GO2)


def _onednn(weight_OI: torch.Tensor) -> Product:
    """A product with one scale for all activations. Real activations would need a scale for each token.

    So the speed of this product is only an upper bound of what oneDNN could reach.
    """
    scales_O = weight_OI.abs().amax(-1) / 127
    values_OI = (weight_OI / scales_O.unsqueeze(-1)).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(values_OI, None)
    zeros_O = torch.zeros(len(scales_O), dtype=torch.int64)

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        scale = float(x_TI.abs().amax()) / 127
        rounded_TI = (x_TI / scale).round_().add_(128).to(torch.uint8)
        y_TO: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rounded_TI, scale, 128, packed, scales_O, zeros_O),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return y_TO

    return product


def measure(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], seconds: float, products: Products
) -> Iterator[Figure]:
    """Measures every side.

    `shapes`: outputs and inputs of each layer. `seconds`: least time per side and row count.
    """
    generator = torch.Generator().manual_seed(0)
    kinds: dict[str, list[Side]] = {}
    for side in sides(products):
        kinds.setdefault(side.weights, []).append(side)
    for kind, members in kinds.items():
        layers: dict[str, list[tuple[int, Product]]] = {side.name: [] for side in members}
        for shape in shapes:
            weight_OI = torch.randn(shape, generator=generator) * 0.05
            for side in members:
                layers[side.name].append((shape[1], side.make(weight_OI)))
        floor_s = _floor(kind, shapes, seconds)
        for num_rows in rows:
            times = _alternate(members, layers, num_rows, seconds)
            for side in members:
                yield Figure(kind, side.name, num_rows, 1e3 * times[side.name], 1e3 * floor_s)


def _alternate(
    members: list[Side], layers: dict[str, list[tuple[int, Product]]], num_rows: int, seconds: float
) -> dict[str, float]:
    """The shortest time that each side takes for all layers together, in seconds."""
    inputs = {
        (side.dtype, num_inputs): torch.randn(num_rows, num_inputs).to(side.dtype)
        for side in members
        for num_inputs, _ in layers[side.name]
    }
    clock = _clock()
    least = {side.name: float("inf") for side in members}
    end = time.perf_counter() + seconds * len(members)
    while time.perf_counter() < end:
        for side in members:
            start = clock()
            for num_inputs, product in layers[side.name]:
                product(inputs[side.dtype, num_inputs])
            least[side.name] = min(least[side.name], clock() - start)
    return least


def _floor(kind: str, shapes: Sequence[tuple[int, int]], seconds: float) -> float:
    """The shortest time in which torch reads as many bytes as the weights and their scales have."""
    bits = {"fp32": 32, "bf16 in fp32": 16, "bf16": 16, "int8": 9, "int4": 5}[kind]
    num_bytes = sum(outputs * inputs for outputs, inputs in shapes) * bits // 8
    floats = torch.ones(num_bytes // 4)
    clock = _clock()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        floats.sum()
        least = min(least, clock() - start)
    return least


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32,256", help="numbers of rows")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each side and number of rows")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library, instructions = native_library(), machine_instructions()
    if library is None or instructions is None:
        parser.exit(1, "there are no kernels of ours on this machine; the log says why\n")
    figures = []
    print(f"{'weights':14}{'rows':>5}  {'side':28}{'ms':>9}{'floor':>9}")
    rows = [int(number) for number in arguments.rows.split(",")]
    shapes = [*LAYER_SHAPES * arguments.layers, LOGITS_SHAPE]
    for figure in measure(shapes, rows, arguments.seconds, Products(library)):
        figures.append(asdict(figure))
        print(
            f"{figure.weights:14}{figure.rows:5}  {figure.side:28}"
            f"{figure.milliseconds:9.2f}{figure.floor_milliseconds:9.2f}",
            flush=True,
        )
    if arguments.json is not None:
        setting = {
            "instructions": instructions.name,
            "machine": platform.machine(),
            "threads": arguments.threads,
            "torch": torch.__version__,
        }
        save_json(arguments.json, {**setting, "figures": figures})


if __name__ == "__main__":
    main()
