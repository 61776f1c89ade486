"""TokenizerPool: runs a tokenizer within bounds, on threads of its own, so that the event loop is not blocked."""

from collections.abc import Sequence

from baton.errors import InvalidRequest, PromptTooLong
from gateway.conversation import Conversation
from gateway.text.fair_threads import FairThreads
from gateway.text.time_limit import run_within
from gateway.text.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 2_000
"""Shorter texts are tokenised at once: a thread would take longer to start on them."""
NUM_THREADS = 5
"""One caller has at most four."""
NUM_TEMPLATE_THREADS = 3
"""Separate threads, so that texts never wait behind a slow template."""
MAX_WAITING = 256
"""Limit for texts, and for conversations, that wait for a thread; the caller with most of them is refused first."""
TEMPLATE_TIMEOUT_S = 5.0
"""Time limit for a template on one conversation. A template is a program, and may not end."""


class TokenizerPool:
    """For use from one event loop. Callers, given by name, take turns by the characters of their texts."""

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, template_timeout_s: float = TEMPLATE_TIMEOUT_S
    ) -> None:
        """Texts that could not fit into `max_tokens`, even if all their tokens were the longest, are not tokenised at
        all.
        """
        self.tokenizer = tokenizer
        self.max_characters = max_tokens * tokenizer.longest_token
        self._template_timeout_s = template_timeout_s
        self._threads = FairThreads(NUM_THREADS, "tokenizer", "texts", MAX_WAITING)
        self._template_threads = FairThreads(
            NUM_TEMPLATE_THREADS, "chat-template", "conversations", MAX_WAITING
        )

    async def encode(self, caller: str, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """PromptTooLong names `prompt`; Overloaded if too many of this caller's wait already."""
        self._check_length("prompt", text)
        return await self._encode(caller, text, add_special_tokens)

    async def encode_chat(
        self,
        caller: str,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Templates write special tokens themselves. InvalidRequest names `chat`; Overloaded if too many of
        this caller's wait already.
        """
        text = await self._render(caller, conversation, add_generation_prompt)
        self._check_length("chat", text)
        return await self._encode(caller, text, add_special_tokens)

    async def decode(self, caller: str, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Overloaded if too much of this caller's waits already."""
        return await self._threads.run(
            caller, len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens)
        )

    async def pieces(self, caller: str, token_ids: Sequence[int]) -> list[str]:
        """Tokens as written in the vocabulary; Overloaded if too much of this caller's waits already."""
        return await self._threads.run(caller, len(token_ids), lambda: self.tokenizer.pieces(token_ids))

    def close(self) -> None:
        """Running work ends by itself; waiting work is refused."""
        self._threads.close()
        self._template_threads.close()

    async def _encode(self, caller: str, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._threads.run(
            caller, len(text), lambda: self.tokenizer.encode(text, add_special_tokens)
        )

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self.max_characters:
            raise PromptTooLong(
                field,
                f"{len(text)} characters exceed the model's limit of {self.max_characters}",
            )

    async def _render(self, caller: str, conversation: Conversation, add_generation_prompt: bool) -> str:
        """The time counts from when a thread begins."""

        def render() -> str:
            return self.tokenizer.render_chat(conversation, add_generation_prompt)

        timeout_s = self._template_timeout_s
        try:
            return await self._template_threads.run(
                caller, conversation.num_characters, lambda: run_within(timeout_s, render)
            )
        except TimeoutError:
            raise InvalidRequest(
                "chat", f"the model's chat template took longer than {timeout_s:g} s"
            ) from None
