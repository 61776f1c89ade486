"""`baton generate`: one prompt to a running gateway, streamed to stdout as it comes or printed whole as JSON."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cli.target import Target
from gateway.client import GenerationEnd

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    completion: GenerationEnd


def run(target: Target, options: argparse.Namespace) -> int:
    """Streams the answer, or prints it as one object. GatewayError says why there is none."""
    keys = ("max_tokens", "temperature", "seed", "ignore_eos", "json_schema", "regex")
    sampling = {key: getattr(options, key) for key in keys}
    prompt = {"text": options.prompt} if options.raw else {"messages": [("user", options.prompt)]}
    on_text = _ignore if options.json else _write
    limits = {key: getattr(options, key) for key in ("max_model_len", "skip_reading_prefix_cache", "mode")}
    answer = asyncio.run(ask(target, on_text, sampling=sampling, **limits, **prompt))
    _write(json.dumps(to_json(answer), ensure_ascii=False) + "\n" if options.json else "\n")
    return 0


async def ask(target: Target, on_text: Callable[[str], None], **request: Any) -> GeneratedAnswer:
    """One request from beginning to end, as `GatewayClient.generate` takes it; `on_text` gets each piece of text as it
    arrives.
    """
    pieces: list[str] = []
    token_ids: list[int] = []
    completion: GenerationEnd | None = None
    async with target.client() as client:
        async for event in client.generate(**request):
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
    """A terminal obeys control characters, and so a model could move its cursor or rename its window: they are shown
    instead, all but line ends and tabs."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    return
