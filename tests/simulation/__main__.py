"""The command: plays one seed with its log, or many on all cores with a summary."""

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.run import Result, play, results

SECONDS_PER_REPORT = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--seed", type=int, help="play this one, and print its log's hash")
    parser.add_argument("--verbose", action="store_true", help="print every event of it")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many to play")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.seed is not None:
        return report(play(args.seed, is_verbose=args.verbose))
    return play_many(args.first, args.seeds, args.jobs)


def report(result: Result) -> int:
    for name, count in sorted(result.counts.items()):
        print(f"{count:>8,}  {name}")
    print(f"seed {result.seed}: {result.num_events} events, log {result.digest}")
    if result.violation is not None:
        print(f"BROKEN {result.violation}")
    return 1 if result.violation is not None else 0


def play_many(first: int, num_seeds: int, num_jobs: int) -> int:
    """0 if every promise was kept in every seed."""
    begun, num_played, num_events = time.monotonic(), 0, 0
    reported, counts, broken = begun, Counter[str](), list[Result]()
    for result in results(range(first, first + num_seeds), num_jobs):
        num_played += 1
        num_events += result.num_events
        counts.update(result.counts)
        if result.violation is not None:
            broken.append(result)
            print(f"seed {result.seed}: {result.violation}\n    replay: {result.replay}", flush=True)
        if time.monotonic() - reported > SECONDS_PER_REPORT:
            reported = time.monotonic()
            print(f"{num_played:,} seeds, {num_played / (reported - begun):.0f} a second", flush=True)
    elapsed_s = time.monotonic() - begun
    for name, count in sorted(counts.items()):
        print(f"{count:>12,}  {name}")
    print(
        f"{num_played:,} seeds, {num_events:,} events in {elapsed_s:.0f} s "
        f"({num_played / elapsed_s:.0f} seeds a second): {len(broken)} broke a promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
