"""Only the computing thread of a worker is stopped, by ptrace, while its other threads go on: first of a decode worker,
then of the prefill worker.

    python -m tests.chaos.computing_thread [--model FOLDER] [--streams 16] [--json FILE]

`baton serve` with one prefill and two decode workers, as a user starts it. Every stream must end as it would without
the fault, and the worker must be replaced. The computing thread is the one that used the most CPU time while streams
ran.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.client import GatewayClient
from tests.chaos.clients import Clients
from tests.chaos.fleet import serve_flags, until_healed
from tests.chaos.questions import answer_all, make_questions
from tests.factories.serving import ServeProcess, serving

NUM_PREFILL, NUM_DECODE = 1, 2
NUM_QUESTIONS = 16
MAX_TOKENS = 60
BEFORE_S, OBSERVED_S = 4.0, 3.0
LOST_TIMEOUT_S = 140.0
"""Longer than `engine.progress_timeout_s`."""
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_FOR_THREADS = 0x4206, 0x4207, 0x40000000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.computing_thread")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16, help="at a time, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with serving(*serve_flags("local", options.model, NUM_PREFILL, NUM_DECODE)) as serve:
        report = asyncio.run(_run(serve, serve.wait_ready()["target"], options.streams))
        serve.interrupt()
        report["exit_code"] = serve.wait_gone()
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["exit_code"] == 0 and all(_is_well(row) for row in report["rows"].values()) else 1


async def _run(serve: ServeProcess, target: str, num_streams: int) -> dict[str, Any]:
    rows = {}
    async with GatewayClient(target) as client:
        info = await client.model_info()
        questions = make_questions(random.Random(1), NUM_QUESTIONS, info["vocab_size"], MAX_TOKENS)
        questions = await answer_all(client, questions)
        for role in ("decode", "prefill"):
            clients = Clients(target, questions, num_streams, seed=1)
            streaming = asyncio.create_task(clients.run())
            await asyncio.sleep(BEFORE_S)
            rows[role] = row = await _stop_one(serve, client, role)
            await asyncio.sleep(BEFORE_S)
            clients.stop()
            await streaming
            row["at_rest_after_s"], row["unrest"] = await until_healed(client, NUM_PREFILL + NUM_DECODE)
            tally = clients.tally
            row |= {
                "streams": tally.num_streams,
                "right": tally.num_right,
                "moved": tally.num_moved,
                "wrong": tally.wrong,
                "longest_stall_s": max(tally.longest_gaps),
            }
            print(f"{role}: {row}", flush=True)
    return {"rows": rows}


async def _stop_one(serve: ServeProcess, client: GatewayClient, role: str) -> dict[str, Any]:
    """Stops the thread of the busiest worker of this role. Returns when the worker has been replaced."""
    workers = [worker for worker in (await client.describe())["workers"] if worker["role"] == role]
    victim = max(workers, key=lambda worker: worker["requests"]["running"])
    num_lines = serve.stderr.count("\n")
    stopped = StoppedThread(await asyncio.to_thread(computing_thread, victim["pid"]))
    began = time.monotonic()
    async with asyncio.timeout(LOST_TIMEOUT_S):
        await asyncio.to_thread(stopped.gone.wait)
    ended_after_s = time.monotonic() - began
    replaced_after_s, missing = await until_healed(client, NUM_PREFILL + NUM_DECODE, at_rest=False)
    log = "\n".join(serve.stderr.splitlines()[num_lines:])
    limit = re.search(r"has made no progress for .*?; its limit is ([\d.]+) s", log)
    return {
        "worker": victim["name"],
        "limit_s": float(limit[1]) if limit else None,
        "worker_ended_after_s": ended_after_s,
        "replaced_after_s": ended_after_s + replaced_after_s,
        "missing": missing,
    }


def _is_well(row: dict[str, Any]) -> bool:
    return (
        row["right"] == row["streams"]
        and not row["missing"]
        and not row["unrest"]
        and row["limit_s"] is not None
        and row["longest_stall_s"] < 2 * row["limit_s"]
    )


def computing_thread(pid: int) -> int:
    """The thread of this process that uses the most CPU time."""
    before = _cpu_time_by_thread(pid)
    time.sleep(OBSERVED_S)
    after = _cpu_time_by_thread(pid)
    return max(after, key=lambda tid: after[tid] - before.get(tid, 0))


def _cpu_time_by_thread(pid: int) -> dict[int, int]:
    """In clock ticks."""
    times = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        times[int(folder.name)] = int(fields[11]) + int(fields[12])
    return times


class StoppedThread:
    """A thread of another process that does not run until that process ends; `gone` is set then.

    Linux requires that one thread makes all ptrace calls. The process is gone only after its tracer was notified of
    its end.
    """

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self.gone = threading.Event()
        threading.Thread(target=self._trace, name="tracer", daemon=True).start()

    def _trace(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        ptrace: Callable[..., int] = libc.ptrace
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            if ptrace(request, self._tid, None, None) != 0:
                raise OSError(ctypes.get_errno(), f"ptrace of thread {self._tid}")
        while True:
            _, status = os.waitpid(self._tid, WAIT_FOR_THREADS)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self.gone.set()
                return


if __name__ == "__main__":
    sys.exit(main())
