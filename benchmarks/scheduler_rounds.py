"""The timed rounds of a scheduler. Knows no particular scheduler."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from benchmarks.peer import Order
from benchmarks.scheduler_play import Side
from benchmarks.scheduler_workloads import RequestSpec, Settings

BLOCK_SIZE = 16
NUM_DECODE_STEPS = 64
CONTEXT = 128
"""Prompt tokens of the shortest request that decodes. The other requests have up to 15 more, so that in every
step one in 16 requests needs a new block."""
NUM_ADMITTED = 1_000
PROMPT = 512
"""Prompt tokens of a request that waits for admission. Half of the tokens are in the prefix cache."""


class MakeSide(Protocol):
    def __call__(self, settings: Settings, *, is_async: bool = False) -> Side: ...


def decode_us(
    make_side: MakeSide,
    num_running: int,
    num_blocks: int,
    num_drafts: int = 0,
    num_steps: int = NUM_DECODE_STEPS,
) -> list[float]:
    """Microseconds of each step, for planning the step and for processing its tokens.

    In each step, every request gets a token, and half of its drafts are right.
    """
    side = make_side(_settings(num_running, num_blocks, num_running * 2 * CONTEXT, num_drafts))
    for number in range(num_running):
        prompt = ((f"q{number}", CONTEXT + number % BLOCK_SIZE),)
        _add(side, RequestSpec(f"r{number}", 0, prompt, 2 * CONTEXT, ignore_eos=True))
    for _ in range(3):
        _step_us(side, num_drafts=num_drafts)
    with _settled_heap():
        return [_step_us(side, num_drafts=num_drafts) for _ in range(num_steps)]


def admit_us(make_side: MakeSide) -> list[float]:
    """Microseconds per request of one step that admits all waiting requests."""
    side = make_side(_settings(NUM_ADMITTED, 20_000, NUM_ADMITTED * PROMPT))
    prefix = ("s", PROMPT // 2)
    _add(side, RequestSpec("first", 0, (prefix, ("q", 1)), 1))
    while side.num_unfinished:
        _step_us(side)
    for number in range(NUM_ADMITTED):
        _add(side, RequestSpec(f"r{number}", 0, (prefix, (f"q{number}", PROMPT // 2)), 10, ignore_eos=True))
    with _settled_heap():
        return [_step_us(side, num_expected=NUM_ADMITTED) / NUM_ADMITTED]


def arrive_us(make_side: MakeSide) -> list[float]:
    """Microseconds to make and queue a request, including the hashes of its prompt's blocks."""
    side = make_side(_settings(NUM_ADMITTED, 20_000, NUM_ADMITTED * PROMPT))
    specs = [RequestSpec(f"r{number}", 0, ((f"q{number}", PROMPT),), 10) for number in range(NUM_ADMITTED)]
    prompts = [spec.prompt_token_ids for spec in specs]
    with _settled_heap():
        start = time.perf_counter()
        for spec, prompt in zip(specs, prompts, strict=True):
            side.add(spec, prompt)
        return [1e6 * (time.perf_counter() - start) / NUM_ADMITTED]


ROUNDS: dict[str, Callable[[MakeSide], list[float]]] = {
    "step, 64 running": partial(decode_us, num_running=64, num_blocks=20_000),
    "step, 256 running": partial(decode_us, num_running=256, num_blocks=20_000),
    "step, 256 with 4 drafts": partial(decode_us, num_running=256, num_blocks=20_000, num_drafts=4),
    "step, 1,024 running": partial(decode_us, num_running=1_024, num_blocks=20_000),
    "step, 4,096 running": partial(decode_us, num_running=4_096, num_blocks=65_536),
    "arrival of a request": arrive_us,
    "admission of a request": admit_us,
}


def run_round(make_side: MakeSide, order: Order) -> Order:
    """Runs one round: answers {"round": NAME} with {"us": [...]}."""
    return {"us": ROUNDS[order["round"]](make_side)}


def _settings(
    max_num_seqs: int, num_blocks: int, max_num_batched_tokens: int, num_drafts: int = 0
) -> Settings:
    return Settings(
        policy="fcfs",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=0,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=4_096,
        num_speculative_tokens=num_drafts,
    )


def _add(side: Side, spec: RequestSpec) -> None:
    side.add(spec, spec.prompt_token_ids)


def _step_us(side: Side, num_expected: int = 0, num_drafts: int = 0) -> float:
    """Runs one step, and returns its time without the runner's part.

    Every running request gets a token, and half of its drafts are right.
    """
    start = time.perf_counter()
    plan = side.schedule()
    planned = time.perf_counter()
    request_ids = side.request_ids(plan)
    assert len(request_ids) >= num_expected, f"only {len(request_ids)} requests run, {num_expected} should"
    shares = side.decisions(plan).shares if num_drafts else ()
    num_right = {share.request_id: len(share.drafts) // 2 for share in shares}
    sampled = {request_id: [17] * (1 + num_right.get(request_id, 0)) for request_id in request_ids}
    drafts = dict.fromkeys(request_ids, [17] * num_drafts) if num_drafts else {}
    runner_output = side.runner_output(plan, sampled, drafts)
    computed = time.perf_counter()
    side.update(plan, runner_output)
    return 1e6 * (planned - start + time.perf_counter() - computed)


@contextmanager
def _settled_heap() -> Iterator[None]:
    """Excludes all existing objects from garbage collection, as engines do after their start."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
