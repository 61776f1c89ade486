"""Random workloads through the real scheduler and a fake runner, in every mode; from a seed, and the same each time.

    python -m tests.property.workloads --seeds 10000 [--first 0] [--windows]

A failing seed is printed with the command that replays it. `make simulate-scheduler` runs ten thousand.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import FinishReason
from baton.sampling import GrammarKind, StructuredOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.guesses import forces, guesses
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import (
    EOS,
    FakeRunner,
    flatten,
    make_request,
    make_scheduler,
    token_at,
)

Options = dict[str, Any]
"""A request as keyword arguments, so that every scheduler gets requests of its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests with their times, and the engine that gets them."""

    settings: dict[str, Any]
    requests: tuple[Options, ...]
    arrivals: dict[str, int]
    """The step before which each request comes."""
    aborts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run a workload, which must not change the tokens of any request."""

    batching: str
    num_ahead: int
    num_drafts: int = 0
    has_grammars: bool = False
    """Every request that may have one has one, which forces tokens."""

    def __str__(self) -> str:
        return f"{self.batching}-{self.num_ahead}-{self.num_drafts}" + "-forced" * self.has_grammars

    def request(self, options: "Options", **others: Any) -> Request:
        has_grammar = self.has_grammars and not (options["ignore_eos"] or options["min_tokens"])
        grammar = GRAMMAR if has_grammar else None
        return make_request(**options, structured_output=grammar, **others)


BATCHINGS = ("unified", "prefill_first", "mixed")
MODES = [Mode(batching, num_ahead) for batching in BATCHINGS for num_ahead in (0, 1)]
GROUPS = [KVGroups(1, 1, 20), KVGroups(1, 2, 33), KVGroups(2, 1, 5), KVGroups(0, 1, 16)]
"""Of models with sliding windows."""
MODES += [Mode(batching, 0, num_drafts=3) for batching in BATCHINGS]
MODES.append(Mode("unified", 1, num_drafts=3, has_grammars=True))
GRAMMAR = StructuredOutput(GrammarKind.REGEX, "whatever the runner says")


def make_workload(seed: int, groups: KVGroups = ONE_GROUP) -> Workload:
    """A small pool (the longest request needs ten rows of blocks), an odd budget, shared prefixes, and every switch."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1_000) for _ in range(rng.randrange(64))] for _ in range(3)]
    num_at_once = rng.choice([1, 1, 20])
    requests: tuple[Options, ...] = tuple(
        {
            "request_id": f"r{i}",
            "prompt": [*rng.choice(stems), *(rng.randrange(1_000) for _ in range(rng.randrange(1, 60)))],
            "max_tokens": rng.randrange(1, 30),
            "min_tokens": rng.choice([0, 0, 1]),
            "ignore_eos": rng.random() < 0.3,
            "priority": rng.randrange(3),
            "arrival_time": float(i // num_at_once),
            "cache_salt": rng.choice([None, None, "salt"]),
        }
        for i in range(rng.randrange(1, 20))
    )
    arrivals: dict[str, int] = {}
    step = 0
    for request in requests:
        step += rng.choice([0, 0, 1, 3])
        arrivals[request["request_id"]] = step
    aborts = {i: at + rng.randrange(20) for i, at in arrivals.items() if rng.random() < 0.1}
    settings = make_settings(rng)
    settings |= {"kv_groups": groups, "num_blocks": 1 + (settings["num_blocks"] - 1) * groups.num_groups}
    return Workload(settings, requests, arrivals, aborts)


def make_settings(rng: random.Random) -> dict[str, Any]:
    preemption = rng.choice(["recompute", "swap"])
    policy = rng.choice(["fcfs", "priority"])
    return {
        "num_blocks": rng.choice([12, 16, 40]),
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": rng.choice([1, 7, 33, 200]),
        "long_prefill_token_threshold": rng.choice([0, 5, 50]),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": policy,
        "priority_ageing_s": rng.choice([0.0, 2.0]) if policy == "priority" else 0.0,
        "preemption": preemption,
        "num_swap_blocks": None if preemption == "recompute" else rng.choice([3, 8, 40]),
        "prefill_first_rules": rng.choice(["nano_vllm", "mini_vllm"]),
    }


def settings_for(workload: Workload, mode: Mode) -> dict[str, Any]:
    """The classical schedulers never split a prompt, so their budget holds the longest request."""
    settings = workload.settings | {"batching": mode.batching, "async_scheduling": mode.num_ahead > 0}
    settings["num_speculative_tokens"] = mode.num_drafts
    if mode.batching != "unified":
        settings |= {"max_num_batched_tokens": 200, "long_prefill_token_threshold": 0}
    if mode.batching != "prefill_first":
        del settings["prefill_first_rules"]
    return settings


def next_token(request_id: str, position: int) -> int:
    """One token in forty ends the request, unless it ignores that."""
    token_id = token_at(request_id, position)
    return EOS if token_id % 40 == 0 else token_id


def expected_tokens(options: Options) -> list[int]:
    """The tokens of the request when it runs alone, by the stop rules."""
    tokens: list[int] = []
    while len(tokens) < options["max_tokens"]:
        tokens.append(next_token(options["request_id"], len(tokens)))
        if tokens[-1] == EOS and not options["ignore_eos"] and len(tokens) >= options["min_tokens"]:
            break
    return tokens


def memory_for(workload: Workload) -> PagedMemory:
    return PagedMemory(16, workload.settings["kv_groups"])


def runner_for(
    mode: Mode,
    memory: PagedMemory,
    next_token: Callable[[str, int], int] = next_token,
) -> FakeRunner:
    return FakeRunner(next_token, memory, guesses(mode.num_drafts, next_token), forces(next_token))


def add(driver: Driver, request: Request) -> None:
    """Adds the request. Its grammar is compiled at once."""
    driver.add(request)
    for grammar in driver.scheduler.wanted_grammars():
        driver.note(flatten(driver.scheduler.grammar_compiled(grammar)))


def play(workload: Workload, mode: Mode) -> Driver:
    """Runs a workload to its end with every check of the driver. Returns the driver, at rest."""
    scheduler = make_scheduler(**settings_for(workload, mode))
    driver = Driver(scheduler, runner_for(mode, memory_for(workload)), mode.num_ahead)
    arrivals: list[Request] = [mode.request(options) for options in workload.requests]
    num_steps = 0

    def before_step() -> None:
        nonlocal num_steps
        while arrivals and workload.arrivals[arrivals[0].request_id] <= num_steps:
            add(driver, arrivals.pop(0))
        due = [i for i, at in workload.aborts.items() if at == num_steps]
        driver.note(flatten(scheduler.finish_requests(due, RequestStatus.FINISHED_ABORTED)))
        num_steps += 1

    while arrivals or scheduler.has_requests():
        before_step()
        assert num_steps < 20_000, f"not done: {scheduler.request_counts()}"
        plan = driver.step()
        assert plan.total_num_scheduled_tokens <= settings_for(workload, mode)["max_num_batched_tokens"]
    driver.complete()
    driver.step()
    driver.check_rest()
    return driver


def check(seed: int, groups: KVGroups = ONE_GROUP) -> Counter[str]:
    """Runs one workload in every mode. Checks that each request that was not aborted has the same tokens in every
    mode. Returns counts of what happened.
    """
    workload = make_workload(seed, groups)
    counters: Counter[str] = Counter()
    for mode in MODES:
        driver = play(workload, mode)
        counters.update(driver.scheduler.counters())
        for options in workload.requests:
            request_id = options["request_id"]
            got, expected = driver.tokens[request_id], expected_tokens(options)
            if driver.ends[request_id] is FinishReason.ABORT:
                assert request_id in workload.aborts, f"{mode}: {request_id} was not to be aborted"
                assert got == expected[: len(got)], f"{mode}: {request_id}"
            else:
                assert got == expected, f"{mode}: {request_id}"
    return counters


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--windows", action="store_true", help="of models with sliding windows")
    args = parser.parse_args()
    start, counters = time.monotonic(), Counter[str]()
    for seed in range(args.first, args.first + args.seeds):
        try:
            counters += check(seed, GROUPS[seed % len(GROUPS)] if args.windows else ONE_GROUP)
        except AssertionError as error:
            replay = f"python -m tests.property.workloads --first {seed} --seeds 1"
            print(f"seed {seed}: {error}\nreplay: {replay}{' --windows' * args.windows}")
            raise
    elapsed_s = time.monotonic() - start
    print(f"{args.seeds} workloads in {len(MODES)} modes each: all ended as they should, {elapsed_s:.0f} s")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counters.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
