"""`baton generate`: sends one prompt to a running gateway.

The answer is streamed to stdout, or printed as JSON at the end.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from cli.target import Target
from cli.tools_file import tool_choice_from, tools_from
from gateway.client import GenerationEnd
from gateway.conversation import AnswerEvent, AnswerParts, ChatMessage, Conversation, Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One complete answer."""

    text: str
    token_ids: tuple[int, ...]
    completion: GenerationEnd
    parts: AnswerParts | None = None
    """The parts of an answer to a conversation. `text` then contains only the part that the user reads."""
    call_ids: tuple[str, ...] = ()


def run(target: Target, options: argparse.Namespace) -> int:
    """Streams the answer, or prints it as one JSON object. Raises GatewayError if the request fails."""
    keys = ("max_tokens", "temperature", "seed", "ignore_eos", "json_schema", "regex")
    sampling = {key: getattr(options, key) for key in keys}
    prompt = _prompt_of(options)
    on_text = _ignore if options.json else _write
    limits = {key: getattr(options, key) for key in ("max_model_len", "skip_reading_prefix_cache", "mode")}
    answer = asyncio.run(ask(target, on_text, sampling=sampling, **limits, **prompt))
    _write(_line_of(to_json(answer)) if options.json else _calls_text(answer))
    return 0


def _prompt_of(options: argparse.Namespace) -> dict[str, Any]:
    """The prompt as arguments of `GatewayClient.generate`. ConfigError names a bad flag."""
    if options.tools is None:
        if options.tool_choice is not None:
            raise ConfigError("--tool-choice needs --tools")
        return {"text": options.prompt} if options.raw else {"messages": [("user", options.prompt)]}
    if options.raw:
        raise ConfigError("--tools needs a chat template; leave out --raw")
    turns = (ChatMessage("user", options.prompt),)
    tools, choice = tools_from(options.tools), tool_choice_from(options.tool_choice)
    return {"conversation": Conversation(turns, tools, choice)}


def _line_of(answer: dict[str, Any]) -> str:
    """One line of JSON. Escapes characters that the terminal's encoding may lack."""
    is_utf_8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(answer, ensure_ascii=not is_utf_8) + "\n"


def _calls_text(answer: GeneratedAnswer) -> str:
    """The output after the text: one line for each tool call."""
    calls = answer.parts.calls if answer.parts else []
    break_ = "\n" if answer.text or not calls else ""
    return break_ + "".join(f"{call.name}({call.arguments})\n" for call in calls)


async def ask(target: Target, on_text: Callable[[str], None], **request: Any) -> GeneratedAnswer:
    """Runs one request from beginning to end.

    `request` has the arguments of `GatewayClient.generate`. `on_text` gets each piece of text when it
    arrives.
    """
    pieces: list[str] = []
    token_ids: list[int] = []
    call_ids: list[str] = []
    completion: GenerationEnd | None = None
    parts = AnswerParts() if "conversation" in request else None
    async with target.client() as client:
        async for event in client.generate(**request):
            text = event.text if parts is None else _text_of(event.parts)
            on_text(text)
            pieces.append(text)
            token_ids += event.token_ids
            call_ids += event.call_ids
            completion = event.completion or completion
            if parts is not None:
                parts.add_events(event.parts)
    assert completion is not None, "a stream that ends well ends with a completion"
    return GeneratedAnswer("".join(pieces), tuple(token_ids), completion, parts, tuple(call_ids))


def _text_of(events: Iterable[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def to_json(answer: GeneratedAnswer) -> dict[str, Any]:
    """The JSON object that `--json` prints."""
    completion = answer.completion
    return {
        "text": answer.text,
        **_parts_to_json(answer),
        "token_ids": list(answer.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "timing": completion.timing,
        "placement": {**completion.placement, "prefill": completion.placement["prefill"] or None},
    }


def _parts_to_json(answer: GeneratedAnswer) -> dict[str, Any]:
    if answer.parts is None:
        return {}
    calls = zip(answer.call_ids, answer.parts.calls, strict=True)
    return {
        "reasoning": answer.parts.reasoning,
        "tool_calls": [
            {"id": id_, "name": call.name, "arguments": call.arguments, "is_whole": call.is_whole}
            for id_, call in calls
        ],
    }


def _write(text: str) -> None:
    """Prints a model's text. Control characters are made visible, except line ends and tabs.

    Unchanged control characters would let a model move the terminal's cursor, or rename its window.
    """
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    return
