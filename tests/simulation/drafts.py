"""Scenarios whose workers verify drafts, or take forced tokens; drawn apart from the rest of their seeds."""

import random
from collections.abc import Iterable
from dataclasses import replace

from simulator.gateway import RequestSpec
from simulator.model import answer
from simulator.worker import WorkerSpec

EVERY = 4
LONGEST_BLOCK = 8


def has_drafts(seed: int) -> bool:
    """One seed in four, none of which is crowded, greedy or poisoned."""
    return seed % EVERY == 1


def with_drafts(
    seed: int, workers: Iterable[WorkerSpec], requests: Iterable[RequestSpec], max_model_len: int
) -> tuple[tuple[WorkerSpec, ...], tuple[RequestSpec, ...]]:
    """Most requests continue an earlier conversation, and so hit blocks that drafts may have left in the prefix cache.
    Answers end where a block ends, since only full blocks hit.
    """
    rng = random.Random(f"drafts of {seed}")
    drafting = [replace(spec, num_drafts=rng.choice([1, 3, 5])) for spec in workers]
    asked: list[RequestSpec] = []
    for spec in requests:
        if asked and rng.random() < 0.7:
            spec = _next_turn(rng, rng.choice(asked), spec, max_model_len)
        num_left = -len(spec.prompt) % LONGEST_BLOCK
        asked.append(replace(spec, max_tokens=num_left if num_left > 2 else num_left + LONGEST_BLOCK))
    return tuple(drafting), tuple(asked)


def has_grammars(seed: int) -> bool:
    """One seed in four, none of which is crowded, greedy or poisoned; half of them have drafts, too."""
    return seed % (2 * EVERY) in (1, 2)


def with_grammars(seed: int, requests: Iterable[RequestSpec]) -> tuple[RequestSpec, ...]:
    """Tokens are forced in some answers."""
    rng = random.Random(f"grammars of {seed}")
    return tuple(replace(spec, has_grammar=rng.random() < 0.6) for spec in requests)


def _next_turn(
    rng: random.Random, earlier: RequestSpec, spec: RequestSpec, max_model_len: int
) -> RequestSpec:
    said = answer(earlier.prompt, earlier.max_tokens, max_model_len)
    prompt = (*earlier.prompt, *said, rng.randrange(1_000))
    return replace(
        spec,
        prompt=prompt[: max_model_len - 1],
        arrives_at=earlier.arrives_at + rng.uniform(0.05, 0.5),
        cache_salt=earlier.cache_salt,
    )
