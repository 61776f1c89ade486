"""Draws the pictures of docs/scheduler.md, from the traces of real workers that compute real requests.

    python examples/draw_scheduler.py [--model smollm2] [--pictures two-phases mixed]

For each picture, a small cluster of child processes answers a few requests, which arrive at chosen moments. `baton
trace` draws the workers' traces. Times differ from run to run, but the schedulers' decisions rarely do.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baton.config import BatonConfig
from cli.main import main as baton
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import GatewayClient

WORD = "one "
LINES = "".join(f"Line {number}: the cat sat on the mat.\n" for number in (1, 2, 3))
"""A text that repeats itself, except for its numbers."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, which is sent when the answer to question `after` has `num_tokens` tokens.

    The prompt is `text`. If `text` is empty, the prompt has `num_words` words, almost all of them the same word.
    """

    num_words: int
    max_tokens: int
    mode: Literal["disaggregated", "local"] = "local"
    after: int | None = None
    num_tokens: int = 1
    text: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: the scheduler's configuration, the questions, and the workers whose traces are drawn. The decode
    worker is the last worker."""

    name: str
    scheduler: dict[str, Any]
    questions: tuple[Question, ...]
    workers: tuple[str, ...] = ("w0",)
    speculation: dict[str, Any] = field(default_factory=dict)


PICTURES = (
    Picture(
        "chunked-prefill",
        {"max_num_batched_tokens": 64},
        (
            Question(20, 14),
            Question(30, 14),
            Question(150, 4, after=0, num_tokens=2),
            Question(40, 5, after=2),
        ),
    ),
    Picture(
        "preemption",
        # A gateway sends only prompts that find free blocks. Then the answers need more blocks than there are.
        {"max_num_batched_tokens": 128, "num_blocks": 13, "block_size": 8, "enable_prefix_caching": False},
        (Question(20, 28), Question(22, 22), Question(13, 24)),
    ),
    Picture(
        "remote-kv",
        {"max_num_batched_tokens": 128},
        (
            Question(25, 16),
            Question(300, 6, "disaggregated", after=0, num_tokens=2),
            Question(40, 8, "disaggregated", after=0, num_tokens=4),
        ),
        ("w0", "w1"),
    ),
    Picture(
        "speculation",
        {"max_num_batched_tokens": 128},
        (
            Question(0, 28, text=LINES),
            Question(30, 12, after=0, num_tokens=4),
        ),
        speculation={"method": "ngram"},
    ),
    Picture(
        "two-phases",
        {"batching": "prefill_first", "max_num_seqs": 2, "max_num_batched_tokens": 256},
        (
            Question(20, 14),
            Question(30, 12),
            Question(60, 4, after=0, num_tokens=2),
            Question(40, 3, after=0, num_tokens=2),
        ),
    ),
    Picture(
        "mixed",
        {"batching": "mixed", "max_num_seqs": 3, "num_blocks": 91},
        (
            Question(256, 10),
            Question(128, 16, after=0, num_tokens=1),
            Question(64, 12, after=0, num_tokens=2),
            Question(100, 4, after=0, num_tokens=4),
        ),
    ),
)


async def ask_all(target: str, questions: tuple[Question, ...]) -> None:
    """Sends each question at its moment, and reads all answers to their ends."""
    progress = [asyncio.Condition() for _ in questions]
    num_answered = [0] * len(questions)

    async def ask(number: int, question: Question) -> None:
        if (after := question.after) is not None:
            async with progress[after]:
                await progress[after].wait_for(lambda: num_answered[after] >= question.num_tokens)
        prompt = question.text or f"{number} " + WORD * (question.num_words - 2)
        sampling = {"max_tokens": question.max_tokens, "temperature": 0.0, "ignore_eos": True}
        async for event in client.generate(text=prompt, sampling=sampling, mode=question.mode):
            num_answered[number] += len(event.token_ids)
            async with progress[number]:
                progress[number].notify_all()

    async with GatewayClient(target) as client, asyncio.TaskGroup() as group:
        for number, question in enumerate(questions):
            group.create_task(ask(number, question))


async def play(picture: Picture, model: Path, trace_dir: str) -> None:
    """Starts a picture's workers, asks its questions, and stops the workers."""
    config = BatonConfig.from_mapping(
        {
            "engine": {"trace_dir": trace_dir, "kv_cache_memory_mib": 64},
            "scheduler": picture.scheduler,
            "speculation": picture.speculation,
            "gateway": {"grpc_port": 0, "http_port": None},
            "cluster": {"prefill": len(picture.workers) - 1},
        }
    )
    async with child_processes(config, model) as cluster:
        await ask_all(cluster.target, picture.questions)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a model folder, or a name that Baton knows")
    names = [picture.name for picture in PICTURES]
    parser.add_argument("--pictures", nargs="+", choices=names, default=names, help="which ones (all)")
    options = parser.parse_args()
    model = resolve(options.model, default_cache_dir(os.environ))
    for picture in (picture for picture in PICTURES if picture.name in options.pictures):
        with tempfile.TemporaryDirectory() as trace_dir:
            asyncio.run(play(picture, model, trace_dir))
            traces = [str(next(Path(trace_dir).glob(f"{worker}-*.jsonl"))) for worker in picture.workers]
            code = baton(["trace", *traces])
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
