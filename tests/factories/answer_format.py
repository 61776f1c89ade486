"""A format of answers that tests can read: `<think>...</think>` and `<call name>{...}</call>`."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import (
    AnswerEvent,
    AnswerParser,
    AnswerPart,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    Conversation,
    Reasoning,
    Text,
    ToolUse,
)
from gateway.conversation.reader import Steps

TAGS = {"text": ("<think>", "<call "), "think": ("</think>",), "name": (">",), "arguments": ("</call>",)}
"""The tags that end a part, by the part."""
AFTER = {"<think>": "think", "<call ": "name", "</think>": "text", ">": "arguments", "</call>": "text"}
"""The part that follows a tag."""
PARTS = {
    "text": AnswerPart.TEXT,
    "think": AnswerPart.REASONING,
    "name": AnswerPart.CALL,
    "arguments": AnswerPart.CALL,
}


class MarkedParser(AnswerParser):
    """A parser whose parts end with tags. Text that may be the beginning of a tag is held back."""

    def __init__(self) -> None:
        super().__init__(may_reason=True)
        self._kind = "text"
        self._rest = ""
        self._num_calls = 0

    def push(self, text: str) -> Sequence[AnswerEvent]:
        self._rest += text
        events: list[AnswerEvent] = []
        while found := self._next_tag():
            at, tag = found
            events += self._events_of(self._rest[:at], tag)
            self._rest = self._rest[at + len(tag) :]
            self._kind = AFTER[tag]
            self.part = PARTS[self._kind]
        if self._kind != "name":
            held = self._num_held()
            events += self._events_of(self._rest[: len(self._rest) - held])
            self._rest = self._rest[len(self._rest) - held :]
        return events

    def flush(self) -> Sequence[AnswerEvent]:
        rest, self._rest = self._rest, ""
        return [] if self._kind == "name" else self._events_of(rest)

    def _run(self) -> Steps[None]:
        yield from ()  # `push` and `flush` do it all

    def _next_tag(self) -> tuple[int, str] | None:
        places = [(at, tag) for tag in TAGS[self._kind] if (at := self._rest.find(tag)) >= 0]
        return min(places, default=None)

    def _num_held(self) -> int:
        beginnings = [tag[:size] for tag in TAGS[self._kind] for size in range(1, len(tag))]
        return max((len(each) for each in beginnings if self._rest.endswith(each)), default=0)

    def _events_of(self, content: str, tag: str = "") -> list[AnswerEvent]:
        if self._kind == "name":
            self._num_calls += 1
            return [CallBegins(self._num_calls - 1, content)]
        events: list[AnswerEvent] = []
        if content and self._kind == "arguments":
            events.append(ArgumentsDelta(self._num_calls - 1, content))
        elif content:
            events.append(Text(content) if self._kind == "text" else Reasoning(content))
        if tag == "</call>":
            events.append(CallEnds(self._num_calls - 1))
        return events


class MarkedFormat:
    """The conversation's tools and turns become plain turns of the tests' chat template.

    Forced calls are guided.
    """

    kept_special_tokens: Mapping[str, str] = MappingProxyType({})

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        """The arguments of the template, which reads any option. So all options are accepted."""
        turns = []
        if tools := conversation.tools:
            names = ", ".join(f"{tool.name}{json.dumps(tool.parameters)}" for tool in tools)
            turns.append({"role": "system", "content": f"tools: {names}"})
        for turn in conversation.messages:
            content = f"<think>{turn.reasoning}</think>" if turn.reasoning else ""
            content += turn.content
            content += "".join(f"<call {call.name}>{call.arguments}</call>" for call in turn.tool_calls)
            role = f"{turn.role} {turn.name}" if turn.name else turn.role
            turns.append({"role": role, "content": content})
        return {"conversation": turns, **conversation.template_options}

    def grammar(
        self,
        conversation: Conversation,
        prompt_end: str,
        response_format: StructuredOutput | None,
    ) -> StructuredOutput | None:
        if conversation.callable_tools and conversation.tool_choice.use is ToolUse.REQUIRED:
            names = "|".join(tool.name for tool in conversation.callable_tools)
            rest = ".*" if conversation.parallel_tool_calls else "[^<]*"
            return StructuredOutput(GrammarKind.REGEX, f"<call ({names})>{rest}</call>")
        return response_format

    def new_parser(
        self, conversation: Conversation, prompt_end: str, response_format: StructuredOutput | None = None
    ) -> AnswerParser | None:
        return MarkedParser()
