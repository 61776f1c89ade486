"""Conversations that a chat template refuses: the client reads the first reason, after few renderings."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.errors import InvalidRequest
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.text import Tokenizer, TokenizerPool
from gateway.text import pool as pool_module
from tests.factories.conversations import SEARCH
from tests.factories.models import make_tokenizer_dir

USER, SYSTEM = ChatMessage("user", "hello"), ChatMessage("system", "Be brief")
CALLS = ChatMessage(
    "assistant", "", tool_calls=(ToolCall("1", "search", "{}"), ToolCall("2", "search", "{}"))
)
RESULTS = tuple(ChatMessage("tool", "found", tool_call_id=call_id) for call_id in "12")
AGENTS = Conversation((USER, USER, SYSTEM, CALLS, *RESULTS, USER), (SEARCH,))
"""It has eight forms, and each of them once more with a description of its tool."""
HERMES = "{# <tool_call> #}{% set own = tools %}"
"""This shows that a template knows tools."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NEEDS_DESCRIPTIONS = "{% for tool in tools or [] %}{{ tool.function.description + '.' }}{% endfor %}"
WANTS_SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"


def rendered(tokenizer: Tokenizer, conversation: Conversation) -> tuple[str, int]:
    """The text or the error, and how often the template was rendered."""
    rendering = Mock(wraps=tokenizer._tokenizer.apply_chat_template)
    tokenizer._tokenizer.apply_chat_template = rendering
    try:
        text = tokenizer.render_chat(conversation)
    except InvalidRequest as refusal:
        text = str(refusal)
    return text, rendering.call_count


@pytest.mark.parametrize(
    ("template", "reason", "most"),
    [
        ("{{ raise_exception('never') }}", "never", 10),
        ("{{ tools.nothing.at.all }}", "has no attribute 'nothing'", 10),
        ("{{ raise_exception(messages | length ~ ' turns') }}", "7 turns", 14),
        (NEEDS_DESCRIPTIONS + "{{ raise_exception('never') }}", "has no attribute 'description'", 9),
    ],
)
def test_the_first_refusal_counts_and_few_renderings_follow(
    tmp_path: Path, template: str, reason: str, most: int
) -> None:
    error, num_renderings = rendered(Tokenizer(make_tokenizer_dir(tmp_path, HERMES + template)), AGENTS)

    assert error.startswith("chat: the model's chat template refused the conversation: ")
    assert reason in error
    assert num_renderings <= most


@pytest.mark.parametrize(
    "template", [WANTS_SYSTEM_FIRST + NEEDS_DESCRIPTIONS, NEEDS_DESCRIPTIONS + WANTS_SYSTEM_FIRST]
)
def test_tools_get_descriptions_beside_other_changes(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(make_tokenizer_dir(tmp_path, HERMES + template + "{{ messages[0].content }}"))

    assert rendered(tokenizer, AGENTS) == (".Be brief", 4 if template.startswith(WANTS_SYSTEM_FIRST) else 3)
    without_tools = replace(AGENTS, tools=())
    assert rendered(tokenizer, without_tools)[0] == "Be brief"


def test_tools_get_descriptions_beside_other_changes_of_which_the_template_says_the_same(
    tmp_path: Path,
) -> None:
    """The template has one message for everything that it refuses."""
    wants_descriptions = (
        "{% for tool in tools if tool.function.description is not defined %}"
        "{{ raise_exception('system first') }}{% endfor %}"
    )
    template = HERMES + WANTS_SYSTEM_FIRST + wants_descriptions + "{{ messages[0].content }}"
    tokenizer = Tokenizer(make_tokenizer_dir(tmp_path, template))
    assert rendered(tokenizer, Conversation((USER, SYSTEM), (SEARCH,)))[0] == "Be brief"


async def test_a_refusal_outlives_the_time_limit_of_the_renderings_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TEMPLATE_TIMEOUT_S", 0.2)
    template = "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}" + ENDLESS
    pool = TokenizerPool(Tokenizer(make_tokenizer_dir(tmp_path, template)), 2_000, 64)

    with pytest.raises(InvalidRequest, match=r"refused the conversation: system first$"):
        await pool.encode_chat("alice", Conversation((USER, SYSTEM)))
    pool.close()


async def test_an_accepted_conversation_outlives_the_time_limit_of_its_other_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template leaves out the system message, and does not end if the message comes first."""
    monkeypatch.setattr(pool_module, "TEMPLATE_TIMEOUT_S", 0.2)
    template = "{% if messages[0].role == 'system' %}" + ENDLESS + "{% endif %}fine"
    own = Tokenizer(make_tokenizer_dir(tmp_path, template))
    pool = TokenizerPool(own, 2_000, 64)

    assert await pool.encode_chat("alice", Conversation((USER, SYSTEM))) == own.encode("fine")
    pool.close()
