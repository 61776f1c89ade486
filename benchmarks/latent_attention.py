"""Attention to latents in DeepSeek-V2-Lite's shapes, by our kernels and torch, compared with whole keys and values.

python -m benchmarks.latent_attention [--rounds 7]      milliseconds of a layer, medians of alternating rounds

A chunk can also project its context's latents to the keys and values of all heads (192 and 128 numbers), and attend to
these. Absorbed attention instead projects only the chunk's tokens. For one token, both projections have equally many
multiplications. The time of absorbed attention's projection is not included.

Shape suffixes: T tokens, P rows of a token (heads and latent), D numbers of a row, H heads, C latent, R
rotated part, X other.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from engine.kv_cache import KVBlockShape, KVPool
from engine.latent_config import LatentAttention
from engine.layers.native_attention import NativeAttention
from engine.layers.paged_attention import PagedAttention
from engine.model_config import ModelArchitecture
from engine.native.library import native_library
from engine.rope_config import RopeConfig
from tests.factories.attention_steps import step_batch

CPU = torch.device("cpu")
HEADS, BLOCK_SIZE = 16, 16
LATENT = LatentAttention(
    rank=512, rotary_dim=64, plain_dim=128, value_dim=128, query_rank=None, is_interleaved=True
)
STEPS = {
    "8 decodes after 500 tokens": [(500, 1)] * 8,
    "1 decode after 4,000 tokens": [(4000, 1)],
    "a chunk of 512 tokens": [(512, 512)],
    "a chunk of 256 after 1,792 tokens": [(2048, 256)],
}


def architecture() -> ModelArchitecture:
    return ModelArchitecture(
        vocab_size=1,
        hidden_size=2048,
        intermediate_size=1,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=LATENT.size,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        ropes=(RopeConfig(),),
        sliding_windows=(None,),
        mixtures=(None,),
        latent=LATENT,
        attention_scale=LATENT.scale(None),
        tie_word_embeddings=False,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
    )


def sides(contexts: list[tuple[int, int]], dtype: torch.dtype) -> Mapping[str, Callable[[], object]]:
    """What a layer computes, by the name of the side."""
    tables, first = [], 1
    for length, _ in contexts:
        tables.append(list(range(first, first + -(-length // BLOCK_SIZE))))
        first += len(tables[-1])
    pool = KVPool(first, KVBlockShape(1, 1, BLOCK_SIZE, LATENT.size, dtype, is_latent=True), CPU)
    pool.blocks_NLKHTD.normal_()
    batch = step_batch(contexts, tables, BLOCK_SIZE)
    rows_TPD = torch.randn(len(batch.positions_T), HEADS + 1, LATENT.size).to(dtype)
    found: dict[str, Callable[[], object]] = {}
    if (library := native_library()) is not None:
        native = NativeAttention(library, pool, architecture(), HEADS, dtype)
        found["own kernels"] = lambda: native.prepare(batch)(0, rows_TPD, None)
    by_torch = PagedAttention(pool, architecture(), HEADS, dtype)
    found["torch"] = lambda: by_torch.prepare(batch)(0, rows_TPD, None)
    ((length, new), *others) = contexts
    if new > 1 and not others:
        found["torch, whole keys and values"] = whole_heads(length, new, dtype)
    return found


def whole_heads(length: int, new: int, dtype: torch.dtype) -> Callable[[], object]:
    latents_TC = torch.randn(length, LATENT.rank).to(dtype)
    weight_XC = torch.randn(HEADS * (LATENT.plain_dim + LATENT.value_dim), LATENT.rank).to(dtype)
    rotated_THR = torch.randn(length, 1, LATENT.rotary_dim).to(dtype).expand(-1, HEADS, -1)
    q_1HTD = torch.randn(1, HEADS, new, LATENT.query_dim).to(dtype)
    mask = torch.full((new, length), -torch.inf, dtype=dtype).triu_(length - new + 1)

    def attend() -> torch.Tensor:
        kv_THX = F.linear(latents_TC, weight_XC).unflatten(-1, (HEADS, -1))
        k_HTD = torch.cat((kv_THX[..., : LATENT.plain_dim], rotated_THR), -1).transpose(0, 1)
        v_HTD = kv_THX[..., LATENT.plain_dim :].transpose(0, 1)
        return F.scaled_dot_product_attention(q_1HTD, k_HTD[None], v_HTD[None], attn_mask=mask)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for dtype in (torch.float32, torch.bfloat16):
        for name, contexts in STEPS.items():
            calls = sides(contexts, dtype)
            times: dict[str, list[float]] = {side: [] for side in calls}
            for _ in range(rounds):
                for side, call in calls.items():
                    began = time.perf_counter()
                    call()
                    times[side].append(1e3 * (time.perf_counter() - began))
            shown = ", ".join(f"{side} {statistics.median(each):.1f}" for side, each in times.items())
            print(f"{str(dtype).removeprefix('torch.')}, {name}: {shown}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
