"""What the order of tokens and heads within a KV block costs on CPU; the numbers of docs/decisions/0001.

    python -m benchmarks.kv_block_layout [--rounds 15]

Both candidates keep a block one contiguous span. Every case computes the same attention in bfloat16 with SmolLM2-135M's
shapes (30 layers, 3 kv heads, 9 query heads, 64 wide, 16 tokens a block), over blocks in shuffled order, gathering into
memory that is reused. Cases alternate within a round, and medians are reported.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

LAYERS, KV_HEADS, PER_KV_HEAD, HEAD_DIM, BLOCK_SIZE = 30, 3, 3, 64, 16
NUM_BLOCKS = 1024
DTYPE = torch.bfloat16

Case = Callable[[], object]


class Pool:
    """One pool in one of the two layouts, and how a context is gathered from it."""

    def __init__(self, *, heads_first: bool) -> None:
        self.heads_first = heads_first
        inner = (KV_HEADS, BLOCK_SIZE) if heads_first else (BLOCK_SIZE, KV_HEADS)
        self.blocks = torch.zeros(NUM_BLOCKS, LAYERS, 2, *inner, HEAD_DIM, dtype=DTYPE)
        self._spans = KV_HEADS if heads_first else 1
        self._rows = self.blocks.view(NUM_BLOCKS * LAYERS * 2 * self._spans, -1)
        self._slots = self.blocks.view(-1, HEAD_DIM if heads_first else KV_HEADS * HEAD_DIM)
        self._memory = torch.empty(0, dtype=DTYPE)

    def rows_of(self, tables_BM: torch.Tensor) -> torch.Tensor:
        """Row indices of layer 0, flat over (key or value, request, head if heads come first, block)."""
        spans = torch.arange(2 * self._spans).view(2, 1, self._spans, 1)
        return (tables_BM[None, :, None] * (LAYERS * 2 * self._spans) + spans).flatten()

    def gather(self, layer: int, rows: torch.Tensor, num_requests: int) -> torch.Tensor:
        """[2, B, H, S, D]; strided where tokens come first."""
        source = self._rows[layer * 2 * self._spans :]
        if self._memory.numel() < rows.numel() * source.shape[1]:
            self._memory = torch.empty(rows.numel() * source.shape[1], dtype=DTYPE)
        out = self._memory[: rows.numel() * source.shape[1]].view(rows.numel(), -1)
        torch.index_select(source, 0, rows, out=out)
        if self.heads_first:
            return out.view(2, num_requests, KV_HEADS, -1, HEAD_DIM)
        return out.view(2, num_requests, -1, KV_HEADS, HEAD_DIM).transpose(2, 3)

    def write(self, layer: int, slots_T: torch.Tensor, kv_T2HD: torch.Tensor) -> None:
        """Stores a step's keys and values."""
        block, offset = slots_T // BLOCK_SIZE, slots_T % BLOCK_SIZE
        if self.heads_first:
            pairs_heads = torch.arange(2 * KV_HEADS)
            rows = ((block * LAYERS + layer)[:, None] * 2 * KV_HEADS + pairs_heads) * BLOCK_SIZE + offset[
                :, None
            ]
        else:
            rows = ((block * LAYERS + layer)[:, None] * 2 + torch.arange(2)) * BLOCK_SIZE + offset[:, None]
        self._slots.index_copy_(0, rows.flatten(), kv_T2HD.reshape(rows.numel(), -1))


def products(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Decode attention as two batched products; copies where heads lie apart."""
    q_XGD = q.reshape(-1, PER_KV_HEAD, HEAD_DIM)
    k_XSD, v_XSD = (x.reshape(len(q_XGD), -1, HEAD_DIM) for x in kv)
    weights = (torch.bmm(q_XGD, k_XSD.transpose(1, 2)) * HEAD_DIM**-0.5).softmax(-1)
    return torch.bmm(weights, v_XSD)


def fused(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """torch's fused kernel, which takes strides."""
    return F.scaled_dot_product_attention(q, kv[0], kv[1])


def decode_case(pool: Pool, batch: int, context: int, attend: Callable[..., torch.Tensor]) -> Case:
    num_blocks = context // BLOCK_SIZE
    rows = pool.rows_of(torch.randperm(NUM_BLOCKS)[: batch * num_blocks].view(batch, num_blocks))
    q = torch.randn(batch, KV_HEADS, PER_KV_HEAD, HEAD_DIM).to(DTYPE)
    return lambda: [attend(q, pool.gather(layer, rows, batch)) for layer in range(LAYERS)]


def chunk_case(pool: Pool, num_queries: int, num_keys: int) -> Case:
    rows = pool.rows_of(torch.randperm(NUM_BLOCKS)[: num_keys // BLOCK_SIZE].view(1, -1))
    q = torch.randn(1, KV_HEADS * PER_KV_HEAD, num_queries, HEAD_DIM).to(DTYPE)
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    mask = torch.zeros(num_queries, num_keys, dtype=DTYPE).masked_fill(hidden, -math.inf)

    def run() -> None:
        for layer in range(LAYERS):
            k, v = pool.gather(layer, rows, 1)
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return run


def write_case(pool: Pool, num_tokens: int) -> Case:
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    kv = torch.randn(num_tokens, 2, KV_HEADS, HEAD_DIM).to(DTYPE)

    def run() -> None:
        for layer in range(LAYERS):
            pool.write(layer, slots, kv)

    return run


@torch.inference_mode()
def main() -> None:
    """Prints milliseconds for all 30 layers of one step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    tokens_first, heads_first = Pool(heads_first=False), Pool(heads_first=True)
    print(f"{'ms a step, 30 layers':36}{'tokens first':>14}{'heads first':>14}")
    for batch, context in ((1, 352), (8, 352), (32, 352)):
        for name, attend in (("products", products), ("fused", fused)):
            cases = [decode_case(pool, batch, context, attend) for pool in (tokens_first, heads_first)]
            _report(f"decode, batch {batch}, {context} tokens, {name}", cases, rounds)
    for num_queries, num_keys in ((512, 2048), (128, 2048)):
        cases = [chunk_case(pool, num_queries, num_keys) for pool in (tokens_first, heads_first)]
        _report(f"chunk, {num_queries} of {num_keys} tokens, fused", cases, rounds)
    for num_tokens in (1, 32, 2048):
        _report(
            f"write {num_tokens}",
            [write_case(pool, num_tokens) for pool in (tokens_first, heads_first)],
            rounds,
        )


def _report(name: str, cases: list[Case], rounds: int) -> None:
    times = [[_seconds(case) for case in cases] for _ in range(rounds + 2)][2:]
    medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
    print(f"{name:36}" + "".join(f"{value:>14.2f}" for value in medians), flush=True)


def _seconds(case: Case) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
