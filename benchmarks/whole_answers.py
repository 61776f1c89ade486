"""What the largest answers that are not streamed cost a gateway: memory while they are collected, time of one turn.

    python -m benchmarks.whole_answers [--model FOLDER]

Each answer is as long as it may be, in one choice, and each runs in a process of its own. No dispatcher and no socket:
tokens come from a loop, and what is written is thrown away.

    held        MiB by which the process grew until the answer was collected; less what it had to spare before
    collect     microseconds of CPU time for a token
    portion     milliseconds of CPU time for the slowest 128 tokens
    turn        milliseconds of CPU time for the slowest turn that wrote JSON; for gRPC, to make one message of all
    size        MiB of the answer
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from time import thread_time

import psutil
from rich.console import Console
from rich.table import Table

from baton.request import TokenLogprobs
from gateway.choices import MAX_VALUES, PORTION_TOKENS
from gateway.grpc.vllm_whole import WholeResponse
from gateway.http.openai.answers import PromptTokensDetails, Usage
from gateway.http.openai.chat import ChatAnswer
from gateway.http.openai.choices import Collected
from gateway.http.openai.completions import CompletionAnswer
from gateway.http.openai.events import Head
from gateway.http.openai.logprobs import ChatTokens, CompletionLogprobsStream, CompletionTokens
from gateway.requests.request import Delta
from gateway.text import Tokenizer
from gateway.turn_budget import TURN_S
from tests.factories.answers import finish_of
from tests.factories.models import make_tokenizer_dir

HEAD = Head("id", 1, "model")
USAGE = Usage(1, 1, 2, PromptTokensDetails(0))
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_answers")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer; default a tiny one")
    options = parser.parse_args()
    table = Table("answer", "logprobs", "tokens", "held", "collect", "portion", "turn", "size")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_tokenizer_dir(Path(folder) / "tokenizer")
        for num_top in (None, 0, 20):
            for kind in ("chat", "completion", "gRPC"):
                with get_context("spawn").Pool(1) as process:
                    table.add_row(*process.apply(measure, (model, kind, num_top)))
    Console().print(table)


def measure(model: Path, kind: str, num_top: int | None) -> tuple[str, ...]:
    tokenizer = Tokenizer(model)
    num_tokens = MAX_VALUES // (1 + (num_top or 0))
    deltas = tokens_of(tokenizer, num_tokens, num_top)
    answer = WholeResponse(0) if kind == "gRPC" else Collected()
    before = psutil.Process().memory_info().rss
    collect_s, portion_s = collect(deltas, answer.take)
    held = psutil.Process().memory_info().rss - before
    if isinstance(answer, WholeResponse):
        began = thread_time()
        size = len(answer.serialised(finish_of()))
        turn_s = thread_time() - began
    else:
        answer.finish = finish_of()
        size, turn_s = write(pieces_of(tokenizer, kind, answer, num_top is not None))
    figures = (held / MIB, collect_s / num_tokens * 1e6, portion_s * 1e3, turn_s * 1e3, size / MIB)
    return kind, str(num_top), str(num_tokens), *(f"{figure:.1f}" for figure in figures)


def tokens_of(tokenizer: Tokenizer, num_tokens: int, num_top: int | None) -> Iterator[Delta]:
    """One at a time, of five characters each."""
    rng = random.Random(0)
    for position in range(num_tokens):
        token_id = position % tokenizer.vocab_size
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_top is not None:
            top = tuple(
                ((token_id + rank) % tokenizer.vocab_size, -9 * rng.random()) for rank in range(num_top)
            )
            logprobs = (TokenLogprobs(token_id, -9 * rng.random(), 1, top),)
        yield Delta((token_id,), " text", logprobs)


def collect(deltas: Iterator[Delta], take: Callable[[Delta], None]) -> tuple[float, float]:
    total_s = slowest_s = 0.0
    while portion := list(islice(deltas, PORTION_TOKENS)):
        began = thread_time()
        for delta in portion:
            take(delta)
        took_s = thread_time() - began
        total_s, slowest_s = total_s + took_s, max(slowest_s, took_s)
    return total_s, slowest_s


def pieces_of(tokenizer: Tokenizer, kind: str, answer: Collected, has_logprobs: bool) -> Iterator[str]:
    if kind == "chat":
        tokens = ChatTokens(tokenizer) if has_logprobs else None
        return ChatAnswer(HEAD, 1, tokens).whole([answer], USAGE)
    logprobs = [CompletionLogprobsStream(CompletionTokens(tokenizer), True, (5,))] if has_logprobs else None
    return CompletionAnswer(HEAD, [""], logprobs).whole([answer], USAGE)


def write(pieces: Iterator[str]) -> tuple[int, float]:
    """Bytes, and the slowest turn."""
    size, slowest_s, began = 0, 0.0, thread_time()
    for piece in pieces:
        size += len(piece.encode())
        if (took_s := thread_time() - began) >= TURN_S:
            slowest_s, began = max(slowest_s, took_s), thread_time()
    return size, max(slowest_s, thread_time() - began)


if __name__ == "__main__":
    main()
