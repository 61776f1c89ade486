"""The turns, tools and variables for a model's chat template, in the shape that templates expect; checks variables."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.messages import ChatMessage, Conversation, Tool, ToolCall

ChatTurn = dict[str, Any]
TemplateValue = str | int | float | bool | None

SWITCHES = ("enable_thinking", "thinking")
"""Template variables that enable and disable reasoning."""
EFFORT = "reasoning_effort"
SENT_TO_ALL_MODELS = frozenset(
    {
        *SWITCHES,
        EFFORT,
        "add_vision_id",
        "clear_thinking",
        "preserve_thinking",
        "thinking_budget",
    }
)
"""Variables that clients send to every model. A template that does not read one of them is no error, as in vLLM. Any
other unread variable may be a typing error."""
PAST_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields of a turn in which templates look for its reasoning."""
_THOUGHT_PART = re.compile(r"""['"]assistant['"].*\btype(?:['"]\])?\s*==\s*['"]thinking['"]""", re.DOTALL)
"""The sign of a template that looks for a turn's reasoning in a part of its content, such as Magistral's."""

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Variables that clients may not set, since they say how a template is rendered, or since a request has fields of its
own for them."""
MAX_OPTIONS = 32
MAX_OPTION_CHARACTERS = 1_024
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
RESERVED_ENDS = ("_token", "_tokens")
"""Ends of names of special tokens, such as `bos_token`. Clients may not set them."""


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """The differences between chat templates."""

    arguments_are_text: bool = False
    """Arguments of earlier calls are JSON text, not an object."""
    ids_are_short: bool = False
    """Ids of calls consist of nine letters and digits."""
    has_null_content: bool = False
    """The content of a turn that consists of calls only is None, not an empty text."""


class ChatTemplate:
    """A template's source, and the variables and fields that it reads."""

    def __init__(self, source: str) -> None:
        self.source = source
        variables, fields = _names_in(source)
        self._variables, self._fields = frozenset(variables), frozenset(fields)
        self._has_thought_parts = (
            fields.isdisjoint(PAST_REASONING[:2]) and _THOUGHT_PART.search(source) is not None
        )

    def reads(self, variable: str) -> bool:
        return variable in self._variables

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """The variables for the client's reasoning options, and those that the client set itself.

        A level of effort, and SENT_TO_ALL_MODELS, have no effect if the template does not read them. Raises
        InvalidRequest for any other variable that the template does not read.
        """
        variables = self._by_reasoning(conversation)
        for name, value in conversation.template_options.items():
            if name in SENT_TO_ALL_MODELS and not self.reads(name):
                continue
            if name in RESERVED or not self.reads(name):
                raise InvalidRequest(
                    "template_options", f"the model's chat template has no variable {name!r}"
                )
            if variables.setdefault(name, value) != value:
                raise InvalidRequest(
                    "reasoning",
                    f"asks for {name}={variables[name]!r}, but the chat's variables have {name}={value!r}; make the "
                    "two equal",
                )
        return variables

    def _by_reasoning(self, conversation: Conversation) -> dict[str, Any]:
        reasoning = conversation.reasoning
        variables: dict[str, Any] = {}
        if reasoning.is_enabled is not None:
            if (switch := next(filter(self.reads, SWITCHES), None)) is not None:
                variables[switch] = reasoning.is_enabled
            elif not reasoning.is_enabled:
                raise InvalidRequest("reasoning", "this model's chat template cannot turn reasoning off")
        if reasoning.effort is not None and self.reads(EFFORT):
            variables[EFFORT] = reasoning.effort
        return variables

    def turns(self, conversation: Conversation, style: TemplateStyle) -> list[ChatTurn]:
        """The messages as turns, in the shape that templates with tools expect."""
        return [self._turn(message, style) for message in conversation.messages]

    def past_reasoning(self, message: ChatMessage, text: str) -> ChatTurn:
        """The fields in which the template looks for a turn's reasoning, with this text; none if the turn has no
        reasoning."""
        if message.reasoning is None:
            return {}
        if self._has_thought_parts and message.reasoning:
            after = [{"type": "text", "text": text}] if text else []
            return {"content": [{"type": "thinking", "thinking": message.reasoning}, *after]}
        return {field: message.reasoning for field in PAST_REASONING if field in self._fields}

    def _turn(self, message: ChatMessage, style: TemplateStyle) -> ChatTurn:
        turn: ChatTurn = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, style) for call in message.tool_calls]
            if style.has_null_content and not message.content:
                turn["content"] = None
        turn |= self.past_reasoning(message, message.content)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = (
                _short(message.tool_call_id) if style.ids_are_short else message.tool_call_id
            )
        if message.name is not None:
            turn["name"] = message.name
        return turn


def _names_in(source: str) -> tuple[set[str], set[str]]:
    """The names of variables in a template's code, and those of fields: after a point, or as a string. If the template
    has a syntax error, the names before it."""
    # not at the top of the file, since most commands render no template
    from jinja2 import Environment, TemplateSyntaxError

    variables, fields, is_after_point = set[str](), set[str](), False
    with suppress(TemplateSyntaxError):
        for _, kind, text in Environment().lex(source):
            if kind == "name":
                (fields if is_after_point else variables).add(text)
            elif kind == "string":
                fields.add(text[1:-1])
            is_after_point = text == "." if kind != "whitespace" else is_after_point
    return variables, fields


def check_template_options(field: str, options: Mapping[str, TemplateValue]) -> None:
    """Checks variables that a client sets: they must be few, have plain values, and not be variables that the gateway
    sets itself. `field`: the name of the options in the caller's API. InvalidRequest names this field, or a key of it.

    Does not check whether a template reads a variable, or knows its value.
    """
    if len(options) > MAX_OPTIONS:
        raise InvalidRequest(field, f"must have at most {MAX_OPTIONS} entries, got {len(options)}")
    for key, value in options.items():
        if not NAME.fullmatch(key):
            raise InvalidRequest(field, f"{key[:60]!r} is not a valid name of a template's variable")
        path = f"{field}.{key}"
        if key in RESERVED or key.endswith(RESERVED_ENDS):
            raise InvalidRequest(path, "is set by the gateway; use the request's own fields")
        if not isinstance(value, TemplateValue):
            raise InvalidRequest(path, "must be a string, a number, true, false or null")
        if isinstance(value, str) and len(value) > MAX_OPTION_CHARACTERS:
            raise InvalidRequest(
                path, f"must have at most {MAX_OPTION_CHARACTERS} characters, got {len(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(path, "must be a finite number")


def described(tool: Tool) -> dict[str, Any]:
    """A tool in the shape of OpenAI's API, which templates expect."""
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.parameters}}


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """The arguments of an earlier call. Raises InvalidRequest if they are not a JSON object."""
    arguments = _parsed(call.arguments)
    if arguments is None:
        raise InvalidRequest("chat", f"the arguments of the call '{call.id[:60]}' are not a JSON object")
    return arguments


def is_object(arguments: str) -> bool:
    """Whether these are the arguments of a call: a JSON object, or nothing."""
    return _parsed(arguments) is not None


def _parsed(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _call(call: ToolCall, style: TemplateStyle) -> dict[str, Any]:
    arguments = arguments_of(call)
    return {
        "id": _short(call.id) if style.ids_are_short else call.id,
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": (call.arguments or "{}") if style.arguments_are_text else arguments,
        },
    }


def _short(call_id: str) -> str:
    """An id of nine letters and digits. It is always the same for the same `call_id`."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]
