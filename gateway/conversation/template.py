"""What a model's own chat template is given: its turns, tools and variables, in the shape that templates expect."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.messages import ChatMessage, Conversation, Tool, ToolCall

ChatTurn = dict[str, Any]

SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn reasoning on and off."""
EFFORT = "reasoning_effort"
PAST_REASONING = ("reasoning_content", "reasoning", "thinking")
"""A turn's fields for its reasoning."""

_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")
_VARIABLE = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_FIELD = re.compile(r"\.(\w+)|['\"](\w+)['\"]")

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
"""What says how a template is rendered, or what a request says elsewhere."""


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """Where templates differ."""

    arguments_are_text: bool = False
    """Of earlier calls: JSON text, not an object."""
    ids_are_short: bool = False
    """Ids of calls have nine letters and digits."""
    has_null_content: bool = False
    """A turn of calls alone has content None, not an empty text."""


class ChatTemplate:
    """A template's source, and what it reads."""

    def __init__(self, source: str) -> None:
        self.source = source
        code = " ".join(_CODE.findall(source))
        self._fields = frozenset(name for pair in _FIELD.findall(code) for name in pair)
        self._variables = frozenset(_VARIABLE.findall(_STRING.sub(" ", code)))

    def reads(self, variable: str) -> bool:
        return variable in self._variables

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """Variables by the client's reasoning options, and its own. InvalidRequest for those that are not read."""
        variables = self._by_reasoning(conversation)
        for name, value in conversation.template_options.items():
            if name in RESERVED or not self.reads(name):
                raise InvalidRequest(
                    "template_options", f"the model's chat template has no variable {name!r}"
                )
            if variables.setdefault(name, value) != value:
                raise InvalidRequest(
                    "reasoning",
                    f"asks for {name}={variables[name]!r}, but the chat's variables for {value!r}",
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
        if reasoning.effort is not None:
            if not self.reads(EFFORT):
                raise InvalidRequest("reasoning", "this model's chat template knows no levels of effort")
            variables[EFFORT] = reasoning.effort
        return variables

    def turns(self, conversation: Conversation, style: TemplateStyle) -> list[ChatTurn]:
        """The messages, as templates that know tools expect them."""
        return [self._turn(message, style) for message in conversation.messages]

    def _turn(self, message: ChatMessage, style: TemplateStyle) -> ChatTurn:
        turn: ChatTurn = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, style) for call in message.tool_calls]
            if style.has_null_content and not message.content:
                turn["content"] = None
        if message.reasoning is not None:
            turn |= {field: message.reasoning for field in PAST_REASONING if field in self._fields}
        if message.tool_call_id is not None:
            turn["tool_call_id"] = (
                _short(message.tool_call_id) if style.ids_are_short else message.tool_call_id
            )
        if message.name is not None:
            turn["name"] = message.name
        return turn


def described(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API describes it, which is what templates expect."""
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.parameters}}


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """InvalidRequest if an earlier call's arguments are no JSON object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest("chat", f"the arguments of the call '{call.id}' are no JSON object")
    return arguments


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
    """Nine letters and digits, the same for the same id."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]
