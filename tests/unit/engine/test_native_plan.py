"""How our own CPU kernels cut a step's attention: every key once, and partial results in bounded memory."""

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.layers.native_attention import UNLIMITED
from engine.native.attention import (
    ITEM_FIELDS,
    MAX_PARTIALS,
    MERGE_FIELDS,
    AttentionKernels,
    Step,
    most_items,
)
from engine.native.library import native_library
from engine.native.types import TYPE_CODES
from engine.request_table import IntArray

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 128
"""Llama 3.1 70B's."""
REQUEST, IS_DECODE, KV_HEAD, NUM_KV, FIRST_TOKEN, NUM_ROWS, _, FIRST_KEY, END_KEY, PARTIAL = range(
    ITEM_FIELDS
)
CONTEXT = 131_072
MERGED_ROWS = 48
"""As in attention_step.h."""


@dataclass(frozen=True)
class Plan:
    items: IntArray
    merges: IntArray
    num_partials: int


def plan_of(contexts: list[tuple[int, int]], num_threads: int, dtype: torch.dtype = torch.float32) -> Plan:
    """The plan of requests, each as (tokens up to the end of the step, tokens of the step); decodes come first."""
    library = native_library()
    assert library is not None
    context_lens_B, num_tokens_B = (np.array(values) for values in zip(*contexts, strict=True))
    starts_B = np.cumsum(num_tokens_B) - num_tokens_B
    step = Step(
        activation_type=TYPE_CODES[dtype],
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=16,
        num_tokens=int(num_tokens_B.sum()),
        num_requests=len(contexts),
        num_decodes=int((num_tokens_B == 1).sum()),
        num_threads=num_threads,
        starts_B=starts_B.ctypes.data,
        num_tokens_B=num_tokens_B.ctypes.data,
        context_lens_B=context_lens_B.ctypes.data,
    )
    most = most_items(num_tokens_B, context_lens_B, NUM_HEADS, NUM_KV_HEADS)
    items, merges = np.zeros((most, ITEM_FIELDS), np.int64), np.zeros((most, MERGE_FIELDS), np.int64)
    counts = np.zeros(3, np.int64)
    kernels = AttentionKernels(library)
    kernels.plan(ctypes.byref(step), UNLIMITED, items.ctypes.data, merges.ctypes.data, counts.ctypes.data)
    num_items, num_merges, num_partials = counts.tolist()
    assert max(num_items, num_merges) <= most
    return Plan(items[:num_items], merges[:num_merges], num_partials)


STEPS = {
    "a decode": [(CONTEXT, 1)],
    "decodes": [(CONTEXT, 1)] * 48,
    "a chunk": [(CONTEXT, 512)],
    "decodes beside a large chunk": [(CONTEXT, 1)] * 4 + [(CONTEXT, 2048)],
    "chunks of short and long prompts": [(300, 300), (CONTEXT, 128), (2500, 100)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 16, 128])
@pytest.mark.parametrize("contexts", STEPS.values(), ids=STEPS)
def test_partial_results_are_bounded_and_lie_apart(
    contexts: list[tuple[int, int]], num_threads: int, dtype: torch.dtype
) -> None:
    plan = plan_of(contexts, num_threads, dtype)
    assert plan.num_partials <= MAX_PARTIALS
    parts = plan.items[plan.items[:, PARTIAL] >= 0]
    ends = [*parts[1:, PARTIAL], plan.num_partials]
    assert (ends - parts[:, PARTIAL] >= parts[:, NUM_ROWS] * (HEAD_DIM + 2)).all()
    if num_threads == 1:
        assert plan.num_partials == len(parts) == len(plan.merges) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 16, 128])
@pytest.mark.parametrize("contexts", STEPS.values(), ids=STEPS)
def test_every_query_visits_every_key_before_it_once(
    contexts: list[tuple[int, int]], num_threads: int, dtype: torch.dtype
) -> None:
    plan = plan_of(contexts, num_threads, dtype)
    visited: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    num_rows = 0
    for item in plan.items.tolist():
        for kv_head in range(item[KV_HEAD], item[KV_HEAD] + item[NUM_KV]):
            keys = (item[FIRST_KEY], item[END_KEY])
            visited.setdefault((item[REQUEST], item[FIRST_TOKEN], kv_head), []).append(keys)
        num_rows += item[NUM_ROWS] if item[FIRST_KEY] == 0 else 0
    assert num_rows == NUM_HEADS * sum(num_tokens for _, num_tokens in contexts)
    for (request, _, _), ranges in visited.items():
        assert ranges[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
        context, num_tokens = contexts[request]
        assert context - num_tokens < ranges[-1][1] <= context


def test_merges_name_the_parts_of_one_item_and_those_that_are_begun_last_are_shared() -> None:
    plan = plan_of(STEPS["decodes"], 128)
    is_part = plan.items[:, PARTIAL] >= 0
    first = int(is_part.argmax())
    assert 0 < first < len(is_part), "some items are computed whole, since memory does not suffice for all"
    assert is_part[first:].all()
    merges = plan.merges[plan.merges[:, 2] == 0]
    assert merges[0, 0] == first
    assert (merges[:, 0] + merges[:, 1]).tolist() == [*merges[1:, 0], len(plan.items)]
    rows = [
        (begin, row) for begin in merges[:, 0] for row in range(0, plan.items[begin, NUM_ROWS], MERGED_ROWS)
    ]
    assert plan.merges[:, [0, 2]].tolist() == [list(each) for each in rows]
    for begin, count, _ in plan.merges.tolist():
        same = plan.items[begin : begin + count][:, [REQUEST, KV_HEAD, FIRST_TOKEN]]
        assert (same == same[0]).all()


def test_where_memory_suffices_every_large_item_is_shared() -> None:
    plan = plan_of(STEPS["a decode"], 128)
    assert len(plan.merges) == NUM_KV_HEADS
    assert len(plan.items) == NUM_KV_HEADS * CONTEXT // 256
