"""Random workloads through a classical scheduler's model and ours, step by step; from a seed, the same each time.

    python -m tests.property.classical --seeds 2000 [--first 0]

A failing seed is printed with the command that replays it. `make simulate-scheduler` runs ten thousand of each.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.factories.side_by_side import CLASSICAL, SideBySide
from tests.property.workloads import next_token

BLOCKS_OF_LONGEST = 10


def play(seed: int, rules: str, ours: str | None = None) -> Counter[str]:
    """Plays one workload; raises AssertionError if the two schedulers differ. Returns counts of what happened.

    `ours`: the rules of our scheduler, if they are not the model's.
    """
    rng = random.Random(seed)
    settings = make_settings(rng, rules)
    sides = SideBySide(CLASSICAL[rules][0], CLASSICAL[ours or rules][1], **settings, next_token=next_token)
    longest = BLOCKS_OF_LONGEST * settings["block_size"]
    stems = [[rng.randrange(1_000) for _ in range(rng.randrange(longest // 2))] for _ in range(3)]
    arrivals = []
    for i in range(rng.randrange(2, 16)):
        own = [rng.randrange(1_000) for _ in range(rng.randrange(1, longest // 2))]
        prompt = [*rng.choice(stems), *own]
        arrivals.append((f"r{i}", prompt, rng.randrange(1, longest - len(prompt) + 1)))
    pace, happened = rng.choice([0.1, 0.4, 1.0]), Counter[str]()
    while arrivals or sides.driver.scheduler.has_requests():
        while arrivals and rng.random() < pace:
            name, prompt, max_tokens = arrivals.pop(0)
            has_limit = rules == "mini_vllm" and rng.random() < 0.3
            max_model_len = len(prompt) + rng.randrange(1, max_tokens + 1) if has_limit else None
            ignore_eos = rng.random() < 0.7
            sides.add(name, prompt, max_tokens, ignore_eos=ignore_eos, max_model_len=max_model_len)
        sides.step()
        happened["steps"] += 1
        happened["preemptions"] += len(sides.model.preempted)
        happened["steps_with_more_running"] += len(sides.model.running) > settings["max_num_seqs"]
        happened["steps_with_both"] += sides.model.has_both
    sides.finish()
    happened["prefix_cache_hits"] += sides.driver.scheduler.counters().get("prefix_cache_hits", 0)
    return happened


def make_settings(rng: random.Random, rules: str) -> dict[str, Any]:
    """Draws the sizes: blocks for one of the longest requests or for all, one slot or one for each request, and a
    budget for one prompt or for many. Decodes of nano-vLLM have no budget, but ours have, so the budget has room for a
    step of decodes.
    """
    block_size, max_num_seqs = rng.choice([2, 4, 16]), rng.choice([1, 2, 3, 6, 16, 40])
    num_prompts = rng.choice([1, 1, 2, 8])
    budget = num_prompts * BLOCKS_OF_LONGEST * block_size
    return {
        "num_blocks": 1 + rng.choice([BLOCKS_OF_LONGEST, 12, 16, 60, 150]),
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": {"nano_vllm": max(budget, max_num_seqs), "mixed": None}.get(rules, budget),
        "enable_prefix_caching": rng.random() < 0.6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    for rules in CLASSICAL:
        start, happened = time.monotonic(), Counter[str]()
        for seed in range(args.first, args.first + args.seeds):
            try:
                happened += play(seed, rules)
            except AssertionError as error:
                print(
                    f"{rules}, seed {seed}: {error}\n"
                    f"replay: python -m tests.property.classical --first {seed} --seeds 1"
                )
                raise
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(happened.items()))
        print(f"{rules}: {args.seeds} workloads, the same in every step, {time.monotonic() - start:.0f} s")
        print(f"    {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
