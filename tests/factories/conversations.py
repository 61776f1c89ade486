"""Conversations with tools, chat templates in the conventions of model families, and answers as events."""

import random
from collections.abc import Sequence
from dataclasses import replace

from transformers.utils.chat_template_utils import render_jinja_template

from baton.sampling import StructuredOutput
from gateway.conversation import (
    AnswerFormat,
    AnswerParts,
    ArgumentsDelta,
    ChatMessage,
    Conversation,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    Vocabulary,
    answer_format_of,
)
from gateway.conversation.formats import deepseek

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
        },
        "required": ["city"],
    },
)
SEARCH = Tool("search", None, {"type": "object", "properties": {"query": {"type": "string"}}})
TOOLS = (WEATHER, SEARCH)

ASKED = Conversation((ChatMessage("user", "Is it warm in Zürich?"),), TOOLS)
"""A conversation in which the model may call a tool."""

GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _with_calls(calls: str, also: str = "") -> str:
    """A chat template that supports tools, and writes an assistant's calls in this form."""
    return (
        "{% if tools %}<|im_start|>system\n"
        + also
        + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n{% endfor %}"
        + GENERATION
    )


_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"


def _of_glm(before: str, gap: str) -> str:
    """A template of GLM, which writes `before` before each call, and `gap` between tags."""
    key, value, call = "<arg_key>{}</arg_key>", "<arg_value>{}</arg_value>", "<tool_call>{}"
    parts = [call.format("{function-name}"), key.format("{arg-key-1}"), value.format("{arg-value-1}")]
    written = "{{ value if value is string else value | tojson(ensure_ascii=False) }}"
    return _with_calls(
        f"{_EACH}{before}{call.format('{{ f.name }}')}{gap}{{% for key, value in f.arguments.items() %}}"
        f"{key.format('{{ key }}')}{gap}{value.format(written)}{gap}{{% endfor %}}</tool_call>{{% endfor %}}",
        also=f"{gap.join(parts)}\n",
    )


TEMPLATES = {
    "hermes": _with_calls(
        _EACH
        + """{{ '\\n' }}<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>{% endfor %}"""
    ),
    "mistral": _with_calls(
        "[TOOL_CALLS]["
        + _EACH
        + """{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]"""
    ),
    "mistral_named": _with_calls(
        _EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
    ),
    "deepseek_v3": _with_calls(
        f"{deepseek.BEGIN}{_EACH}{deepseek.CALL}{{{{ call.type }}}}{deepseek.SEPARATOR}{{{{ f.name }}}}\n```json\n"
        f"{{{{ f.arguments }}}}\n```{deepseek.CALL_END}"
        f"{{% if not loop.last %}}{{{{ '\\n' }}}}{{% endif %}}{{% endfor %}}{deepseek.END}"
    ),
    "deepseek_v31": _with_calls(
        f"{deepseek.BEGIN}{_EACH}{deepseek.CALL}{{{{ f.name }}}}{deepseek.SEPARATOR}{{{{ f.arguments }}}}"
        f"{deepseek.CALL_END}{{% endfor %}}{deepseek.END}"
    ),
    "llama": _with_calls(
        _EACH
        + """{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- if not loop.last %}; {% endif %}{% endfor %}{# ipython #}"""
    ),
    "olmo": _with_calls(
        "<function_calls>"
        + _EACH
        + """{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}</function_calls>"""
    ),
    "pythonic": _with_calls(
        "["
        + _EACH
        + """{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]""",
        also="Calls look like [func_name(argument=value)].\n",
    ),
    "qwen_coder": _with_calls(
        _EACH
        + """{{ '\\n' }}<tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}"""
    ),
    "glm": _of_glm("{{ '\\n' }}", "\n"),
    "glm 4.7": _of_glm("", ""),
    "minimax": _with_calls(
        "{{ '\\n' }}<minimax:tool_call>\n"
        + _EACH
        + """<invoke name="{{ f.name }}">
{% for key, value in f.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson(ensure_ascii=False) }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>"""
    ),
    "generic": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION,
}
"""Templates by the family that writes calls as text. Each contains the family's markers, and writes calls as
the family does. A family's name is that of its format. If several families have one format, something
that distinguishes them follows after a space."""

HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description }} {{ tool.function | tojson }}{% endfor %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}"
    "{% set later = namespace(is_final=false) %}{% for turn in messages[loop.index:] %}"
    "{% if turn.role == 'assistant' and 'tool_calls' not in turn %}{% set later.is_final = true %}{% endif %}"
    "{% endfor %}{% if m.thinking and not later.is_final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.role == 'assistant' %}{% set last.name = none %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template like gpt-oss's. It writes one call of a turn, and the description of each tool. Results belong
to the last call, unless the assistant wrote a text since then. Thoughts before a final message are left out."""

THINKING = TEMPLATES["hermes"].replace(
    GENERATION,
    GENERATION.replace(
        "{% endif", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif"
    ),
)
"""A template of a model that thinks unless the prompt forbids it."""


def name_of(family: str) -> str:
    """The name of the family's format."""
    return family.partition(" ")[0]


def format_of(family: str, vocabulary: Vocabulary | None = None) -> AnswerFormat:
    return answer_format_of(HARMONY if family == "harmony" else TEMPLATES[family], vocabulary or Vocabulary())


def rendered(
    answer_format: AnswerFormat, template: str, conversation: Conversation, *, is_prompt: bool = True
) -> str:
    """The conversation as a tokenizer renders it."""
    arguments = answer_format.template_arguments(conversation)
    turns = arguments.pop("conversation")
    result = render_jinja_template(
        [turns],
        tools=arguments.pop("tools", None),
        chat_template=template,
        add_generation_prompt=is_prompt,
        **arguments,
    )
    return str(result[0][0])


def written_answer(answer_format: AnswerFormat, template: str, turn: ChatMessage) -> str:
    """The assistant's turn as the template writes it."""
    asked = replace(ASKED, messages=(*ASKED.messages, turn))
    text = rendered(answer_format, template, asked, is_prompt=False)
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


def called(*calls: tuple[str, str]) -> ChatMessage:
    """An assistant's turn with these calls, each a name and arguments."""
    return ChatMessage(
        "assistant",
        "",
        tool_calls=tuple(
            ToolCall(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(calls)
        ),
    )


def parts_of(
    answer_format: AnswerFormat,
    pieces: Sequence[str],
    conversation: Conversation = ASKED,
    prompt_end: str = "",
    answer: StructuredOutput | None = None,
) -> AnswerParts:
    """The parts of an answer that arrives in these pieces."""
    parser = answer_format.new_parser(conversation, prompt_end, answer)
    assert parser is not None
    parts = AnswerParts()
    for piece in pieces:
        parts.add_events(parser.push(piece))
    parts.add_events(parser.flush())
    return parts


def merged_events(
    answer_format: AnswerFormat, pieces: Sequence[str], answer: StructuredOutput | None = None
) -> list[tuple[object, ...]]:
    """The events of an answer that arrives in these pieces. Adjacent events of one kind are joined."""
    parser = answer_format.new_parser(ASKED, "", answer)
    assert parser is not None
    events = [event for piece in pieces for event in parser.push(piece)]
    merged: list[tuple[object, ...]] = []
    for event in [*events, *parser.flush()]:
        fields = [type(event), *(getattr(event, name) for name in event.__slots__)]
        key, last = fields[:-1], fields[-1]
        if isinstance(event, Text | Reasoning | ArgumentsDelta) and merged and merged[-1][:-1] == tuple(key):
            merged[-1] = (*key, f"{merged[-1][-1]}{last}")
        else:
            merged.append((*key, last))
    return merged


def calls_in(parts: AnswerParts) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.is_whole) for call in parts.calls]


def random_answer(rng: random.Random, pieces: Sequence[str]) -> str:
    """Markers, parts of markers, calls and text, in an order that no model would produce."""
    answer = []
    for _ in range(rng.randint(1, 12)):
        piece = rng.choice(pieces)
        begin = rng.randrange(len(piece)) if rng.random() < 0.2 else 0
        end = rng.randrange(begin, len(piece)) + 1 if rng.random() < 0.2 else len(piece)
        answer.append(piece[begin:end])
    return "".join(answer)
