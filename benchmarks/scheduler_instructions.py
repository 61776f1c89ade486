"""How many instructions a step of 256 requests takes in the scheduler: a figure without noise; needs valgrind.

    python -m benchmarks.scheduler_instructions

Times differ by a tenth from run to run, instructions by less than a thousandth. So this shows changes that
`benchmarks.scheduler` cannot. Each row runs twice, and the longer run has 64 more steps. The difference in instructions
is divided by 64. It includes the few instructions that make the model's tokens. Compare figures of the same Python
only.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from functools import partial

from benchmarks.baton_side import BatonSide
from benchmarks.peer import ROOT
from benchmarks.scheduler_rounds import decode_us

NUM_RUNNING = 256
FEW_STEPS, MANY_STEPS = 16, 80
ROWS = {"async_scheduling: false": False, "async_scheduling: true": True}


def main() -> None:
    """Prints a table. With --steps, this process instead is one of the runs that valgrind watches."""
    arguments = _arguments()
    if arguments.steps is not None:
        make_side = partial(BatonSide, is_async=arguments.asynchronous)
        decode_us(make_side, NUM_RUNNING, num_blocks=20_000, num_steps=arguments.steps)
        return
    print(f"millions of instructions, {NUM_RUNNING} requests, Python {platform.python_version()}")
    for row, is_async in ROWS.items():
        print(f"{row:26}{step_instructions(is_async=is_async) / 1e6:>12.3f}", flush=True)


def step_instructions(*, is_async: bool) -> float:
    few, many = (_count_instructions(num_steps, is_async=is_async) for num_steps in (FEW_STEPS, MANY_STEPS))
    return (many - few) / (MANY_STEPS - FEW_STEPS)


def _count_instructions(num_steps: int, *, is_async: bool) -> int:
    """Runs steps under valgrind, and returns the number of instructions of the whole process."""
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    run = [sys.executable, "-m", "benchmarks.scheduler_instructions", "--steps", str(num_steps)]
    run += ["--asynchronous"] * is_async
    # Sets of strings have another order in each process, unless their hashes are fixed.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run([*valgrind, *run], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"valgrind ended with code {done.returncode}: {done.stderr[-1000:]}")
    return instructions_in(done.stderr)


def instructions_in(report: str) -> int:
    """The number of instructions in valgrind's report; RuntimeError if there is none."""
    if (found := re.search(r"I +refs: +([\d,]+)", report)) is None:
        raise RuntimeError(f"valgrind reported no instructions: {report[-1000:]}")
    return int(found[1].replace(",", ""))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, metavar="N", help="run N steps here, without valgrind")
    parser.add_argument("--asynchronous", action="store_true", help="with --steps: async scheduling")
    return parser.parse_args()


if __name__ == "__main__":
    main()
