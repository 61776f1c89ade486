"""Conversations with tools, chat templates of the families' conventions, and answers as events."""

import random
from collections.abc import Sequence

from gateway.conversation import (
    AnswerEvent,
    AnswerFormat,
    AnswerParts,
    ChatMessage,
    Conversation,
    Tool,
    ToolCall,
    Vocabulary,
    answer_format_of,
)

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hourly": {"type": "boolean"}},
        "required": ["city"],
    },
)
SEARCH = Tool("search", None, {"type": "object", "properties": {"query": {"type": "string"}}})
TOOLS = (WEATHER, SEARCH)

ASKED = Conversation((ChatMessage("user", "Is it warm in Zürich?"),), TOOLS)
"""May call."""

TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}"""
"""A template's way of writing turns, without tools."""

TEMPLATES = {
    "hermes": """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "generic": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
"""By family: a template that shows its signs and writes calls as it does."""

THINKING = TEMPLATES["hermes"].replace(
    "assistant\n", "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""A model that thinks unless it is told not to."""


def format_of(family: str, vocabulary: Vocabulary | None = None) -> AnswerFormat:
    return answer_format_of(TEMPLATES[family], vocabulary or Vocabulary())


def called(*calls: tuple[str, str]) -> ChatMessage:
    """An assistant's turn that made these calls: names and arguments."""
    return ChatMessage(
        "assistant",
        "",
        tool_calls=tuple(
            ToolCall(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(calls)
        ),
    )


def parts_of(
    answer_format: AnswerFormat, pieces: Sequence[str], conversation: Conversation = ASKED, prompt_end: str = ""
) -> AnswerParts:
    """What an answer says that comes in these pieces."""
    parser = answer_format.new_parser(conversation, prompt_end)
    assert parser is not None
    parts = AnswerParts()
    for piece in pieces:
        parts.take_in(parser.push(piece))
    parts.take_in(parser.flush())
    return parts


def joined(events: Sequence[AnswerEvent]) -> AnswerParts:
    parts = AnswerParts()
    parts.take_in(events)
    return parts


def calls_in(parts: AnswerParts) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.is_whole) for call in parts.calls]


def random_answer(rng: random.Random, pieces: Sequence[str]) -> str:
    """Markers, parts of them, calls and text, in an order that no model would choose."""
    answer = []
    for _ in range(rng.randint(1, 12)):
        piece = rng.choice(pieces)
        begin = rng.randrange(len(piece)) if rng.random() < 0.2 else 0
        end = rng.randrange(begin, len(piece)) + 1 if rng.random() < 0.2 else len(piece)
        answer.append(piece[begin:end])
    return "".join(answer)
