"""`baton flush-cache`: makes workers forget their prefix caches. Later prompts are computed in full."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from baton.fleet import CacheFlush
from cli.commands.operator_calls import running_command
from cli.target import Target


def run(target: Target, workers: Sequence[str], *, force: bool, as_json: bool) -> int:
    """Returns 1 if any worker keeps its cache; stderr says which worker, and why."""
    started = time.monotonic()
    with running_command("flush-cache", "flushing prefix caches", as_json) as stage:
        flushes = asyncio.run(_flush(target, workers, force))
        flushed = [flush.worker for flush in flushes if flush.is_flushed]
        stage(f"{len(flushed)} of {len(flushes)} workers have forgotten their prefix caches")
    if as_json:
        outcomes = [
            {"worker": flush.worker, "is_flushed": flush.is_flushed, "obstacle": flush.obstacle}
            for flush in flushes
        ]
        print(json.dumps({"workers": outcomes, "total_s": time.monotonic() - started}))
    kept = [flush for flush in flushes if not flush.is_flushed]
    for flush in kept:
        print(f"baton flush-cache: {flush.worker} keeps its prefix cache: {flush.obstacle}", file=sys.stderr)
    return 1 if kept else 0


async def _flush(target: Target, workers: Sequence[str], force: bool) -> tuple[CacheFlush, ...]:
    async with target.client() as client:
        return await client.flush_cache(workers, force=force)
