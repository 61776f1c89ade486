"""Checks step by step, for random workloads, whether Baton's scheduler decides as vLLM's V1 does.

Can record V1's decisions.

    python -m benchmarks.v1_decisions --reference PYTHON [--seeds 1000] [--first 0]
        [--ahead 1 | --drafts | --windows]
    python -m benchmarks.v1_decisions --reference PYTHON --record tests/data/v1_decisions

PYTHON is an interpreter with vllm 0.13.0 (`pip install vllm==0.13.0`); it needs neither a GPU nor Baton. The
first form compares the decisions, including the ids of the blocks. It fails if the two sides differ for a
reason other than these:

    misled    V1 found blocks in its prefix cache that were never computed. It caches a block when it plans to
              fill the block, and keeps the block when the request is preempted in this step. Baton removes such
              blocks from the cache.
    forgetful V1 did not find blocks in its prefix cache that it had computed. If accepted drafts complete a
              block, V1 caches the block only with the request's next step. Baton also caches the block when the
              request ends or is preempted.
    endless   V1 was not done after thousands of steps: requests of equal rank preempt each other in turn. After
              a while, Baton no longer preempts one of them (`scheduler/order.py`).

With `--ahead 1` both sides plan a step while the step before it is computed; V1 uses its AsyncScheduler. When
V1 then preempts a request whose last token is under way, it may skip a later request that runs. Workloads in
which this happens count as different.

With `--drafts` both sides get the same drafts, some right and some wrong, and accept the same numbers of
them. V1 does not plan ahead with guessed drafts, so Baton's side does not either.

With `--windows` the model has several KV groups, some with a sliding window. V1's side is its hybrid
coordinator.

The second form writes the file that `tests/unit/scheduler/test_v1_decisions.py` replays. Workloads for which
V1 shows one of these three flaws are left out.
"""

import argparse
import gzip
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.baton_side import BatonSide
from benchmarks.draft_workloads import BY_HAND, with_drafts
from benchmarks.peer import Peer
from benchmarks.scheduler_play import MAX_STEPS, play
from benchmarks.scheduler_workloads import Workload, make_workload
from benchmarks.window_workloads import BY_HAND as WINDOWS_BY_HAND
from benchmarks.window_workloads import with_windows

KINDS = ("fcfs", "priority", "priority-ties", "drafts", "windows")
"""The kinds of workloads; see `Workload.kind`."""

Recorded = tuple[Workload, list[str]]
"""A workload and V1's steps, as `Decisions` writes them."""


def main() -> int:
    arguments = _arguments()
    with Peer(arguments.reference, "benchmarks.v1_reference") as reference:
        if arguments.record is not None:
            _record(reference, arguments.record, arguments.first, arguments.workloads)
            return 0
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        change = with_drafts if arguments.drafts else with_windows if arguments.windows else _unchanged
        return _compare(reference, seeds, arguments.ahead, change)


def read_recorded(folder: Path, kind: str) -> list[Recorded]:
    """The recordings that `--record` wrote, in the order of the seeds."""
    lines = gzip.decompress(_path(folder, kind).read_bytes()).decode().splitlines()
    return [(Workload.from_json(values["workload"]), values["steps"]) for values in map(json.loads, lines)]


def first_difference(expected: list[str], got: list[str]) -> str | None:
    """The first step in which two recordings differ, with the steps before it; None if they agree."""
    steps = itertools.zip_longest(expected, got, fillvalue="(no step)")
    for number, (one, other) in enumerate(steps):
        if one != other:
            before = [f"  step {n}: {expected[n]}" for n in range(max(0, number - 3), number)]
            return "\n".join([*before, f"  step {number}: V1    {one}", f"  step {number}: Baton {other}"])
    return None


def _compare(reference: Peer, seeds: range, num_ahead: int, change: Callable[[Workload], Workload]) -> int:
    found: Counter[str] = Counter()
    num_steps = num_preemptions = 0
    for seed in seeds:
        workload = change(make_workload(seed))
        theirs = reference.ask({"play": workload.to_json(), "num_ahead": num_ahead})
        side = BatonSide(workload.settings, is_async=num_ahead > 0)
        steps = list(play(side, workload, num_ahead))
        num_steps += len(steps)
        num_preemptions += sum(len(step.preempted) for step in steps)
        difference = first_difference(theirs["steps"], [str(step) for step in steps])
        if difference is None:
            difference = first_difference(theirs["blocks"], [step.blocks for step in steps])
        verdict = _verdict(theirs, difference)
        found[verdict] += 1
        if verdict.startswith("different"):
            print(f"seed {seed}: {workload.settings}\n{difference}")
    print(f"{len(seeds):,} workloads, {num_steps:,} steps, {num_preemptions:,} preemptions")
    for verdict, count in sorted(found.items()):
        print(f"{count:>8,} {verdict}")
    return int(any(verdict.startswith("different") for verdict in found))


def _unchanged(workload: Workload) -> Workload:
    return workload


def _verdict(theirs: dict[str, Any], difference: str | None) -> str:
    is_same = "the same" if difference is None else "different"
    if theirs["is_misled"]:
        return f"misled, and {is_same}"
    if theirs["is_forgetful"]:
        return f"forgetful, and {is_same}"
    if len(theirs["steps"]) == MAX_STEPS:
        return f"endless, and {is_same}"
    return is_same


def _record(reference: Peer, folder: Path, first: int, num_workloads: int) -> None:
    """Records `num_workloads` of each kind.

    Workloads made by hand come before those with drafts and with windows.
    """
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for seed in itertools.count(first):
        for workload in (plain := make_workload(seed), with_drafts(plain), with_windows(plain)):
            recorded = lines[workload.kind]
            if len(recorded) < num_workloads:
                recorded += _steps_of(reference, workload)
        if all(len(recorded) == num_workloads for recorded in lines.values()):
            break
    for kind, by_hand in (("drafts", BY_HAND), ("windows", WINDOWS_BY_HAND)):
        lines[kind][:0] = [line for workload in by_hand.values() for line in _steps_of(reference, workload)]
    folder.mkdir(parents=True, exist_ok=True)
    for kind, recorded in lines.items():
        _path(folder, kind).write_bytes(gzip.compress("".join(recorded).encode(), mtime=0))


def _steps_of(reference: Peer, workload: Workload) -> list[str]:
    """The recording of one workload: a list of one line.

    The list is empty if V1's steps show a flaw, since such steps cannot be compared.
    """
    theirs = reference.ask({"play": workload.to_json(), "num_ahead": 0})
    is_flawed = theirs["is_misled"] or theirs["is_forgetful"] or len(theirs["steps"]) == MAX_STEPS
    return [] if is_flawed else [_line(workload, theirs["steps"])]


def _path(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.jsonl.gz"


def _line(workload: Workload, steps: list[str]) -> str:
    return json.dumps({"workload": workload.to_json(), "steps": steps}, separators=(",", ":")) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", required=True, help="an interpreter with vllm 0.13.0")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many workloads to compare")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--ahead", type=int, choices=(0, 1), default=0, help="1: compare with AsyncScheduler")
    either.add_argument("--drafts", action="store_true", help="compare with drafts")
    parser.add_argument("--windows", action="store_true", help="compare with sliding windows")
    parser.add_argument("--record", type=Path, help="write V1's decisions into this folder instead")
    parser.add_argument("--workloads", type=int, default=100, help="how many of each kind to record")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
