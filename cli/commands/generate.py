"""`baton generate`: one prompt to a running gateway, streamed to stdout as it comes or printed whole as JSON."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cli.target import Target
from gateway.client import GenerationEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and how to answer it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None = None
    is_raw: bool = False
    """Send the text as it is, instead of as a chat with one user turn."""
    ignore_eos: bool = False
    mode: Literal["disaggregated", "local"] | None = None
    json_schema: str | None = None
    """JSON schema that the answer must match, as JSON."""
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    completion: GenerationEnd


def run(target: Target, options: argparse.Namespace) -> int:
    """Streams the answer, or prints it as one object. GatewayError says why there is none."""
    question = Question(
        prompt=options.prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        is_raw=options.raw,
        ignore_eos=options.ignore_eos,
        mode=options.mode,
        json_schema=options.json_schema,
        regex=options.regex,
    )
    on_text = _ignore if options.json else _write
    answer = asyncio.run(ask(target, question, on_text))
    print(json.dumps(to_json(answer), ensure_ascii=False) if options.json else "")
    return 0


async def ask(target: Target, question: Question, on_text: Callable[[str], None]) -> GeneratedAnswer:
    """One request from beginning to end; `on_text` gets each piece of text as it arrives."""
    sampling: dict[str, Any] = {
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "ignore_eos": question.ignore_eos,
        "json_schema": question.json_schema,
        "regex": question.regex,
    }
    pieces: list[str] = []
    token_ids: list[int] = []
    completion: GenerationEnd | None = None
    async with target.client() as client:
        async for event in client.generate(
            text=question.prompt if question.is_raw else None,
            messages=None if question.is_raw else [("user", question.prompt)],
            sampling=sampling,
            mode=question.mode,
        ):
            on_text(event.text)
            pieces.append(event.text)
            token_ids += event.token_ids
            completion = event.completion or completion
    assert completion is not None, "a stream that ends well ends with a completion"
    return GeneratedAnswer("".join(pieces), tuple(token_ids), completion)


def to_json(answer: GeneratedAnswer) -> dict[str, Any]:
    """The object that `--json` prints."""
    completion = answer.completion
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "timing": completion.timing,
        "placement": {**completion.placement, "prefill": completion.placement["prefill"] or None},
    }


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    return
