"""What 8-bit weights, activations and KV cost in accuracy: next-token distributions beside those of bfloat16.

    python -m benchmarks.quantization --model DIR [--windows 9] [--length 512] [--json PATH]

The text is this repository's decision pages, of which there only come more, in windows that are computed through the KV
pool like prompts. Per variant: perplexity; KL(bfloat16 || variant), the mean over all positions in millinats; and how
often both have the same likeliest token. `float32` shows how far bfloat16 itself is from exact arithmetic, which is the
yardstick for the others. Activations in 8 bits are rounded here and multiplied in bfloat16: the same numbers as 8-bit
matrix units give, up to the order of sums.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from baton.config import ModelConfig
from baton.sampling import SamplingParams
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from engine.batch import RequestBatch
from engine.kv_cache import KVPool
from engine.layers.backend import Activations, InputTokens, QuantizedRows
from engine.layers.fp8 import quantize_rows
from engine.layers.fp8_linear import Fp8Linear
from engine.layers.paged_attention import PagedAttention
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import load_model

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a model."""

    name: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    has_fp8_weights: bool = False
    has_fp8_activations: bool = False
    has_fp8_kv: bool = False


REFERENCE = Variant("bfloat16")
VARIANTS = (
    Variant("float32", dtype="float32"),
    Variant("fp8 weights", has_fp8_weights=True),
    Variant("fp8 weights + activations", has_fp8_weights=True, has_fp8_activations=True),
    Variant("fp8 KV", has_fp8_kv=True),
    Variant("all of it", has_fp8_weights=True, has_fp8_activations=True, has_fp8_kv=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One variant's outcome; without the last two for the reference itself."""

    variant: str
    perplexity: float
    kl_millinats: float | None
    same_top_1: float | None


class RoundedFp8Linear(Fp8Linear):
    """Rounds activations as 8-bit matrix units get them."""

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor)
        return super().__call__(QuantizedRows(*quantize_rows(x_TI), x_TI.dtype))


class RoundingBackend(TorchBackend):
    """Activations in 8 bits, on a CPU."""

    def fp8_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Fp8Linear:
        return RoundedFp8Linear(weight_OI, bias_O)


class Subject:
    """A variant of the model, and a pool for one window."""

    def __init__(self, path: Path, variant: Variant, length: int) -> None:
        config = ModelConfig(dtype=variant.dtype, quantization="fp8" if variant.has_fp8_weights else None)
        backend = RoundingBackend() if variant.has_fp8_activations else TorchBackend()
        model = load_model(config, path, CPU, backend, kv_cache_dtype="fp8" if variant.has_fp8_kv else "auto")
        self._block_ids = tuple(range(1, 1 - (-length // BLOCK_SIZE)))
        pool = KVPool(1 + len(self._block_ids), model.kv_block_shape(BLOCK_SIZE), CPU)
        self._attention = PagedAttention(pool, model.architecture, model.architecture.num_heads, model.dtype)
        self._decoder = model.decoder

    @torch.inference_mode()
    def logprobs(self, ids_T: torch.Tensor) -> torch.Tensor:
        """T x V in float32: of the token after each, the window computed as one prompt."""
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
    """Computes every window with every variant, prints a table, and writes JSON if asked to."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    windows = list(_windows(arguments.model, arguments.windows, arguments.length))
    reference = Subject(arguments.model, REFERENCE, arguments.length)
    subjects = {variant.name: Subject(arguments.model, variant, arguments.length) for variant in VARIANTS}
    nll = dict.fromkeys([REFERENCE.name, *subjects], 0.0)
    kl, same = dict.fromkeys(subjects, 0.0), dict.fromkeys(subjects, 0)
    for number, ids_T in enumerate(windows, 1):
        expected_TV = reference.logprobs(ids_T)
        nll[REFERENCE.name] += _nll(expected_TV, ids_T)
        for name, subject in subjects.items():
            found_TV = subject.logprobs(ids_T)
            nll[name] += _nll(found_TV, ids_T)
            kl[name] += F.kl_div(found_TV, expected_TV, reduction="sum", log_target=True).item()
            same[name] += int((found_TV.argmax(-1) == expected_TV.argmax(-1)).sum())
        print(f"window {number} of {len(windows)}", flush=True)
    num_tokens = sum(map(len, windows))
    num_predicted = num_tokens - len(windows)
    rows = [Row(REFERENCE.name, math.exp(nll[REFERENCE.name] / num_predicted), None, None)]
    rows += [
        Row(name, math.exp(nll[name] / num_predicted), 1e3 * kl[name] / num_tokens, same[name] / num_tokens)
        for name in subjects
    ]
    _report(rows, arguments, num_tokens)


def _nll(logprobs_TV: torch.Tensor, ids_T: torch.Tensor) -> float:
    """Of all tokens but the first, which nothing predicts."""
    return -logprobs_TV[:-1].gather(1, ids_T[1:, None]).sum().item()


def _windows(model: Path, num_windows: int, length: int) -> Iterator[torch.Tensor]:
    """Token ids of whole windows of the decision pages, one after the other."""
    files = sorted((ROOT / "docs/decisions").glob("0*.md"))
    text = "\n\n".join(file.read_text() for file in files)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert len(ids) >= num_windows * length, f"the pages have {len(ids)} tokens"
    for start in range(0, num_windows * length, length):
        yield torch.tensor(ids[start : start + length])


def _report(rows: list[Row], arguments: argparse.Namespace, num_tokens: int) -> None:
    print(f"{arguments.model.name}, {num_tokens} tokens in windows of {arguments.length}")
    print(f"{'':28}{'perplexity':>12}{'KL, millinats':>16}{'same top 1':>13}")
    for row in rows:
        kl = "" if row.kl_millinats is None else f"{row.kl_millinats:.2f}"
        same = "" if row.same_top_1 is None else f"{row.same_top_1:.1%}"
        print(f"{row.variant:28}{row.perplexity:>12.3f}{kl:>16}{same:>13}")
    if arguments.json is not None:
        result = {
            "model": arguments.model.name,
            "tokens": num_tokens,
            "length": arguments.length,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, help="write the result here, e.g. benchmarks/results/quantization.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
