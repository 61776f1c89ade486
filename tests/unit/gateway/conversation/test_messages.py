"""Conversations whose system messages become the first message."""

from dataclasses import replace

import pytest

from gateway.conversation import ChatMessage, Conversation, with_system_first
from tests.factories.conversations import ASKED

FIRST, LATE = ChatMessage("system", "Be brief"), ChatMessage("system", "In Dutch")
(USER,) = ASKED.messages


@pytest.mark.parametrize("messages", [(USER,), (FIRST, USER), (FIRST,), ()])
def test_nothing_moves_if_no_later_message_is_of_the_system(messages: tuple[ChatMessage, ...]) -> None:
    assert with_system_first(replace(ASKED, messages=messages)) is None


@pytest.mark.parametrize("messages", [(FIRST, LATE, USER), (FIRST, USER, LATE), (USER, FIRST, LATE)])
def test_all_system_messages_become_the_first(messages: tuple[ChatMessage, ...]) -> None:
    joined = ChatMessage("system", "Be brief\n\nIn Dutch")
    assert with_system_first(replace(ASKED, messages=messages)) == replace(ASKED, messages=(joined, USER))
    assert with_system_first(Conversation((USER, LATE))) == Conversation((LATE, USER))
