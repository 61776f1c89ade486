"""Chaos: a real cluster serves clients while its processes are killed, stopped, broken and restarted all the time.

    python -m tests.chaos [--seconds 300] [--every 3] [--faults 1] [--only "hang worker,kill worker"]
                          [--clients 32] [--seed N] [--model FOLDER | --windows] [--json FILE]

Prefill and decode workers on several Ray nodes of this machine, `baton serve` as a user starts it. Every stream must
be complete and equal to the answer without faults. At the end the fleet must be complete, hold no block, and leave no
process behind. Otherwise, the exit code is 1. A worker has to load before it is killed again: the slower the machine,
the longer `--every`. The seed determines questions and faults, but not the moments at which the faults happen.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gateway.client import GatewayClient
from tests.chaos.clients import Clients, Tally
from tests.chaos.faults import Faults
from tests.chaos.fleet import actors_left, serve_flags, until_healed, watch_absences
from tests.chaos.machines import Machines, prepare
from tests.chaos.main_thread import MainThread, run_beside
from tests.chaos.questions import answer_all, make_questions
from tests.factories.models import WINDOWED, make_model_dir
from tests.factories.serving import serving

NUM_QUESTIONS = 24
NUM_NODES = 3
END_TIMEOUT_S = 180.0
PLACEMENT_TIMEOUT_S = 300.0
"""Every few seconds a worker dies, and on few cores it loads for long: at times none is there for over a minute."""

PROGRESS_TIMEOUT_S = 30.0
"""A worker that has computed little when it hangs has learned no shorter limit."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sabotage = Path(tempfile.mkdtemp())
    prepare(os.environ, sabotage)
    machines = Machines(NUM_NODES, cpus_per_node=2)
    try:
        model = str(_windowed(sabotage)) if options.windows else options.model
        flags = serve_flags(machines.address, model, options.prefill, options.decode)
        with _config() as config, serving(config, *flags) as serve:
            target = serve.wait_ready()["target"]
            report = run_beside(partial(_run, options, machines, sabotage, target))
            serve.interrupt()
            report["exit_code"] = serve.wait_gone()
            report["left_behind"] = actors_left(machines)
            report["stderr"] = serve.stderr
    finally:
        machines.shut_down()
        shutil.rmtree(sabotage)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return _judge(report)


def _windowed(folder: Path) -> Path:
    return make_model_dir(folder / "windowed-model", "qwen2", **WINDOWED)


@contextmanager
def _config() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chaos.yaml"
        sections = {
            "gateway": {"placement_timeout_s": PLACEMENT_TIMEOUT_S},
            "engine": {"progress_timeout_s": PROGRESS_TIMEOUT_S},
        }
        path.write_text(json.dumps(sections))  # JSON is YAML
        yield str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds between faults, default %(default)s"
    )
    parser.add_argument(
        "--faults", type=int, default=1, help="go on until there were this many, default %(default)s"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help="kinds of faults, as the report names them, with commas",
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", default="smollm2", help="default %(default)s")
    parser.add_argument(
        "--windows",
        action="store_true",
        help="a tiny model with sliding windows in two of three KV groups, instead",
    )
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    return parser


async def _run(
    options: argparse.Namespace, machines: Machines, sabotage: Path, target: str, main_thread: MainThread
) -> dict[str, Any]:
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: {options.prefill} P + {options.decode} D on {NUM_NODES} nodes, {target}", flush=True)
    async with GatewayClient(target) as client:
        vocab_size = (await client.model_info())["vocab_size"]
        rng = random.Random(seed)
        questions = await answer_all(
            client, make_questions(rng, NUM_QUESTIONS, vocab_size, options.max_tokens)
        )
        clients = Clients(target, questions, options.clients, seed)
        faults = Faults(machines, main_thread, client, rng, options.every, sabotage, options.only)
        streaming = asyncio.create_task(clients.run())
        disturbing = asyncio.create_task(faults.run())
        absences: list[tuple[float, float]] = []
        watching = asyncio.create_task(watch_absences(client, absences))
        pending = await _first_of(options.seconds, streaming, disturbing)
        while pending and sum(faults.counts.values()) < options.faults:
            pending = await _first_of(1.0, streaming, disturbing)
        is_disturbed = not disturbing.done()
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        await faults.settle()
        clients.stop()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await streaming
        except TimeoutError:
            clients.tally.note_wrong(f"streams had not ended {END_TIMEOUT_S:g} s after the last fault")
        watching.cancel()
        num_workers = options.prefill + options.decode
        healed_after_s, unrest = await until_healed(client, num_workers)
        if not is_disturbed:
            unrest.append(f"the faults ended by themselves: {disturbing.exception()!r}")
        return {
            "seed": seed,
            "faults": dict(sorted(faults.counts.items())),
            "fault_log": faults.log,
            "healed_after_s": healed_after_s,
            "unrest": unrest,
            "gateway": (await client.describe())["gateway"],
            **_figures(clients.tally, absences),
        }


async def _first_of(timeout_s: float, *tasks: asyncio.Task[None]) -> bool:
    """Waits until one of the tasks has ended, or for `timeout_s`. Returns whether none has ended."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return not done


def _share(stalls: Sequence[tuple[float, float]], absences: Sequence[tuple[float, float]]) -> float:
    """The part of the stall time that lies within an absence. Only stalls of a second or more count."""
    long = [(began, ended) for began, ended in stalls if ended - began >= 1.0]
    within_s = sum(
        max(0.0, min(ended, absence[1]) - max(began, absence[0]))
        for began, ended in long
        for absence in absences
    )
    return within_s / (sum(ended - began for began, ended in long) or 1.0)


def _figures(tally: Tally, absences: Sequence[tuple[float, float]]) -> dict[str, Any]:
    gaps = sorted(tally.longest_gaps) or [0.0]
    return {
        "streams": tally.num_streams,
        "right": tally.num_right,
        "moved": tally.num_moved,
        "tokens": tally.num_tokens,
        "num_wrong": tally.num_wrong,
        "wrong": tally.wrong,
        "stall_s": {
            "median": statistics.median(gaps),
            "p99": gaps[int(0.99 * (len(gaps) - 1))],
            "longest": gaps[-1],
        },
        "stalls_without_a_decode_worker": _share(tally.stalls, absences),
    }


def _judge(report: dict[str, Any]) -> int:
    stall = report["stall_s"]
    print(
        f"{report['streams']} streams, {report['right']} as undisturbed, {report['moved']} moved on the way"
    )
    print(f"faults: {', '.join(f'{count} x {name}' for name, count in report['faults'].items())}")
    print(
        f"longest stall of a stream: median {stall['median']:.2f} s, p99 {stall['p99']:.2f} s, "
        f"worst {stall['longest']:.2f} s; whole and at rest {report['healed_after_s']:.1f} s after the last stream"
    )
    print(
        f"of the stalls' time, {report['stalls_without_a_decode_worker']:.0%} passed without a decode worker"
    )
    problems = [*report["wrong"], *report["unrest"]]
    if report["exit_code"] != 0:
        problems.append(f"baton serve ended with {report['exit_code']}")
    problems += [f"left behind: {title}" for title in report["left_behind"]]
    if report["streams"] != report["right"] + report["num_wrong"]:
        problems.append("a stream had no end")
    if problems:
        print(report["stderr"][-5000:], file=sys.stderr)
    for problem in problems:
        print(f"wrong: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
