"""How fewer bits of weights, activations and KV change next-token distributions, compared with float32.

    python -m benchmarks.quantization [--model smollm2] [--windows 9] [--length 512] [--json PATH]

The text consists of this repository's decision pages, to which only new pages are added. It is divided into
windows, which are computed through the KV pool like prompts. Three figures are reported per variant:
perplexity; KL(float32 || variant), the mean over all positions in millinats; and how often both have the same
most likely token. `bfloat16` is the yardstick for the other variants.

`as the file has them` multiplies a GGUF file's groups directly. Its float32 reference has the same weights,
so the product alone makes the difference: it may round activations to 8 bits. `int8` and `int4` round
float32's weights to groups. A GGUF file's numbers lie on the grid of their groups, and int4 would find this
grid again. So groups begin 16 inputs later here. The 8-bit activations of fp8 are rounded here and multiplied
in bfloat16. Apart from the order of sums, this gives the same numbers as 8-bit matrix units.
"""

import argparse
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from baton.config import KVCacheDtype, ModelConfig
from baton.sampling import SamplingParams
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from benchmarks.json_file import save_json
from engine.batch import RequestBatch
from engine.kv_cache import KVPool
from engine.layers.backend import Activations, Backend, InputTokens, LinearLayer, Matrix, QuantizedRows
from engine.layers.fp8 import quantize_rows
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.linear import Fp8Linear
from engine.layers.paged_attention import PagedAttention
from engine.layers.torch_backend import TorchBackend
from engine.loading.gguf_folder import gguf_of
from engine.loading.loader import load_model
from engine.loading.pretrained import default_cache_dir, resolve
from engine.native.instructions import machine_instructions

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
BLOCK_SIZE = 16
HALF_A_GROUP = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a model."""

    name: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    backend: Backend | None = None
    """The backend of the variant. None: the one that workers on this machine use."""
    quantization: Literal["auto", "none", "fp8"] = "none"
    kv_cache_dtype: KVCacheDtype = "auto"


class RoundedFp8Linear(Fp8Linear):
    """Rounds activations to the numbers that 8-bit matrix units receive."""

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor)
        return super().__call__(QuantizedRows(*quantize_rows(x_TI), x_TI.dtype))


class RoundingBackend(TorchBackend):
    """Rounds activations to 8 bits, on a CPU."""

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        assert isinstance(weight_OI, torch.Tensor)
        return RoundedFp8Linear(weight_OI, bias_O)


class GroupingBackend(TorchBackend):
    """Replaces fp8 by groups of 8 or 4 bits; the projection to logits has 8 bits."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits = bits

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        return super().linear(_regrouped(weight_OI, 8), bias_O)

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        return super().linear(_regrouped(weight_OI, self._bits), bias_O)


def _regrouped(weight_OI: Matrix, bits: Literal[4, 8]) -> torch.Tensor:
    """The weight, rounded in groups that begin in the middle of a GGUF file's groups."""
    assert isinstance(weight_OI, torch.Tensor)
    rounded_OI = GroupedWeight.quantize(weight_OI.roll(HALF_A_GROUP, 1), bits).dequantized()
    return rounded_OI.roll(-HALF_A_GROUP, 1).to(weight_OI.dtype)


REFERENCE = Variant("float32", "float32")
VARIANTS = (
    Variant("bfloat16"),
    Variant("as the file has them", "float32", quantization="auto"),
    Variant("as the file has them, bfloat16", quantization="auto"),
    Variant("int8 weights", "float32", GroupingBackend(8), "fp8"),
    Variant("int4 weights", "float32", GroupingBackend(4), "fp8"),
    Variant("fp8 weights", quantization="fp8"),
    Variant("fp8 weights + activations", backend=RoundingBackend(), quantization="fp8"),
    Variant("bfloat16 KV", "float32", kv_cache_dtype="bfloat16"),
    Variant("fp8 KV", kv_cache_dtype="fp8"),
    Variant("fp8 all of it", backend=RoundingBackend(), quantization="fp8", kv_cache_dtype="fp8"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one variant. The reference itself has no values in the last two fields."""

    variant: str
    perplexity: float
    kl_millinats: float | None
    same_top_1: float | None


class Subject:
    """A variant of the model, and a pool that has room for one window."""

    def __init__(self, path: Path, variant: Variant, length: int) -> None:
        config = ModelConfig(dtype=variant.dtype, quantization=variant.quantization)
        model = load_model(config, path, CPU, variant.backend, kv_cache_dtype=variant.kv_cache_dtype)
        self._block_ids = tuple(range(1, 1 - (-length // BLOCK_SIZE)))
        pool = KVPool(1 + len(self._block_ids), model.kv_block_shape(BLOCK_SIZE), CPU)
        self._attention = PagedAttention(pool, model.architecture, model.architecture.num_heads, model.dtype)
        self._decoder = model.decoder

    @torch.inference_mode()
    def logprobs(self, ids_T: torch.Tensor) -> torch.Tensor:
        """T x V in float32: log-probabilities of the token after each position. The window is one prompt."""
        requests = RequestBatch(BLOCK_SIZE)
        plan = self._plan(tuple(ids_T.tolist()))
        requests.update(plan)
        hidden_TE = self._decoder.forward(InputTokens(ids_T), self._attention.prepare(requests.build(plan)))
        return self._decoder.logits(hidden_TE).float().log_softmax(-1)

    def _plan(self, token_ids: tuple[int, ...]) -> SchedulerOutput:
        """A step that computes the whole prompt."""
        request = NewRequestData(
            request_id="window",
            prompt_token_ids=token_ids,
            output_token_ids=(),
            sampling_params=SamplingParams(),
            stop_token_ids=frozenset(),
            block_ids=self._block_ids,
            num_computed_tokens=0,
        )
        return SchedulerOutput(
            scheduled_new_reqs=(request,),
            scheduled_cached_reqs=CachedRequestData(),
            num_scheduled_tokens={"window": len(token_ids)},
            total_num_scheduled_tokens=len(token_ids),
            preempted_req_ids=frozenset(),
            finished_req_ids=frozenset(),
        )


def main() -> None:
    """Computes every window with every variant, prints a table, and writes JSON if requested."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    path = resolve(arguments.model, default_cache_dir(os.environ))
    variants = [each for each in VARIANTS if each.quantization != "auto" or gguf_of(path) is not None]
    windows = list(_windows(path, arguments.windows, arguments.length))
    expected = _all_logprobs(path, REFERENCE, windows)
    rows = [Row(REFERENCE.name, _perplexity(expected, windows), None, None)]
    num_tokens = sum(map(len, windows))
    for variant in variants:  # one after another, so that only one model is in memory
        found = _all_logprobs(path, variant, windows)
        pairs = list(zip(expected, found, strict=True))
        kl = sum(F.kl_div(f_TV, e_TV, reduction="sum", log_target=True).item() for e_TV, f_TV in pairs)
        same = sum(int((f_TV.argmax(-1) == e_TV.argmax(-1)).sum()) for e_TV, f_TV in pairs)
        rows.append(Row(variant.name, _perplexity(found, windows), 1e3 * kl / num_tokens, same / num_tokens))
        print(rows[-1], flush=True)
    _report(rows, arguments, num_tokens)


def _all_logprobs(path: Path, variant: Variant, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    subject = Subject(path, variant, max(map(len, windows)))
    return [subject.logprobs(ids_T) for ids_T in windows]


def _perplexity(logprobs: list[torch.Tensor], windows: list[torch.Tensor]) -> float:
    """The perplexity without each window's first token, which no position predicts."""
    nll = sum(_nll(found_TV, ids_T) for found_TV, ids_T in zip(logprobs, windows, strict=True))
    return math.exp(nll / (sum(map(len, windows)) - len(windows)))


def _nll(logprobs_TV: torch.Tensor, ids_T: torch.Tensor) -> float:
    """The negative log-likelihood of all tokens but the first, which no position predicts."""
    return -logprobs_TV[:-1].gather(1, ids_T[1:, None]).sum().item()


def _windows(model: Path, num_windows: int, length: int) -> Iterator[torch.Tensor]:
    """Token ids of whole windows of the decision pages, in order."""
    files = sorted((ROOT / "docs/decisions").glob("0*.md"))
    text = "\n\n".join(file.read_text() for file in files)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert len(ids) >= num_windows * length, f"the pages have {len(ids)} tokens"
    for start in range(0, num_windows * length, length):
        yield torch.tensor(ids[start : start + length])


def _report(rows: list[Row], arguments: argparse.Namespace, num_tokens: int) -> None:
    print(f"{arguments.model}, {num_tokens} tokens in windows of {arguments.length}")
    print(f"{'':32}{'perplexity':>12}{'KL, millinats':>16}{'same top 1':>13}")
    for row in rows:
        kl = "" if row.kl_millinats is None else f"{row.kl_millinats:.2f}"
        same = "" if row.same_top_1 is None else f"{row.same_top_1:.1%}"
        print(f"{row.variant:32}{row.perplexity:>12.3f}{kl:>16}{same:>13}")
    if arguments.json is not None:
        instructions = machine_instructions()
        result = {
            "model": arguments.model,
            "tokens": num_tokens,
            "length": arguments.length,
            "torch": torch.__version__,
            "instructions": instructions.name if instructions else platform.machine(),
            "rows": [asdict(row) for row in rows],
        }
        save_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a name")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, help="write the result here, e.g. benchmarks/results/quantization.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
