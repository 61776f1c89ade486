"""What a step costs in Baton's scheduler, and in vLLM's V1 scheduler in the same run.

    python -m benchmarks.scheduler [--reference PYTHON] [--rounds 5] [--json PATH]

PYTHON is an interpreter with vllm 0.13.0; without it only Baton is measured. Each side is a process that runs
until the end. Rounds alternate between the sides, so that other work on the machine slows both. Compare
ratios, not figures of different runs. A step consists of `schedule()` and `update_from_output()`; a model
runner's work is not timed. A round gives the median of its steps, and the table gives the median of the
rounds. Both sides cache prefixes, and collect no statistics for people.
"""

import argparse
import os
import platform
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.json_file import save_json
from benchmarks.peer import Peer
from benchmarks.scheduler_rounds import ROUNDS

REFERENCE = "vllm 0.13.0"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one workload, in microseconds. Without --reference, the reference has no figures."""

    workload: str
    baton_us: float
    reference_us: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.reference_us is None else self.reference_us / self.baton_us


def main() -> None:
    """Measures, prints a table, and writes JSON if requested."""
    arguments = _arguments()
    with ExitStack() as stack:
        sides = [stack.enter_context(Peer(sys.executable, "benchmarks.baton_side"))]
        if arguments.reference is not None:
            sides.append(stack.enter_context(Peer(arguments.reference, "benchmarks.v1_reference")))
        rows = [_measure(workload, sides, arguments.rounds) for workload in ROUNDS]
    _report(rows, arguments)


def _measure(workload: str, sides: list[Peer], num_rounds: int) -> Row:
    """Runs one round to warm up, then alternating rounds."""
    rounds = [[_round_us(side, workload) for side in sides] for _ in range(num_rounds + 1)][1:]
    medians = [statistics.median(side) for side in zip(*rounds, strict=True)]
    return Row(workload, medians[0], medians[1] if len(medians) > 1 else None)


def _round_us(side: Peer, workload: str) -> float:
    step_us: list[float] = side.ask({"round": workload})["us"]
    return statistics.median(step_us)


def _report(rows: list[Row], arguments: argparse.Namespace) -> None:
    print(f"{'':26}{'baton':>12}{REFERENCE:>16}{'ratio':>9}")
    for row in rows:
        reference = "" if row.reference_us is None else f"{row.reference_us:>13,.1f} us{row.ratio:>8.2f}x"
        print(f"{row.workload:26}{row.baton_us:>9,.1f} us{reference}")
    if arguments.json is not None:
        result = {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "rounds": arguments.rounds,
            "reference": REFERENCE if arguments.reference is not None else None,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        save_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", metavar="PYTHON", help=f"an interpreter with {REFERENCE}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--json", type=Path, help="write the result here, e.g. benchmarks/results/scheduler.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
