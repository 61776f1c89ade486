"""TokenizerPool: runs a tokenizer on its own threads, with limits; the event loop is not blocked."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.errors import TOO_LONG, InvalidRequest, PromptTooLong
from gateway.conversation import Conversation
from gateway.text.fair_threads import FairThreads
from gateway.text.time_limit import run_within
from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_INLINE_CHARACTERS = 2_000
"""Shorter texts are tokenized on the event loop, which is faster than to pass them to a thread."""
NUM_THREADS = 5
"""The number of threads that tokenize and decode. One caller may use at most four of them at a time."""
NUM_TEMPLATE_THREADS = 3
"""The number of threads that render chat templates. They are separate, so that texts never wait for a slow template."""
TEMPLATE_TIMEOUT_S = 5.0
"""Time limit for a template on one conversation. A template is a program, and might never end."""


class TokenizerPool:
    """Use it from one event loop only. Callers, given by name, take turns by the lengths of their texts."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, max_waiting: int) -> None:
        """Refuses a text without tokenizing it if it cannot fit into `max_tokens` tokens, even with the longest tokens.
        Up to `max_waiting` texts, and as many conversations, may wait. If one more comes, the pool refuses the latest
        text (or conversation) of the caller that has the most of them waiting.
        """
        self.tokenizer = tokenizer
        self.max_characters = max_tokens * tokenizer.longest_token
        self._threads = FairThreads(NUM_THREADS, "tokenizer", "texts", max_waiting)
        self._template_threads = FairThreads(
            NUM_TEMPLATE_THREADS, "chat-template", "conversations", max_waiting
        )

    async def encode(self, caller: str, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text. PromptTooLong names `prompt`. Raises Overloaded if too many of the caller's
        texts wait.
        """
        self._check_length("prompt", text)
        return await self._encode("prompt", caller, text, add_special_tokens)

    async def encode_chat(
        self,
        caller: str,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """The tokens of a conversation; the template itself writes special tokens. InvalidRequest names
        `chat`. Raises Overloaded if too many of the caller's conversations wait.
        """
        text = await self._render(caller, conversation, add_generation_prompt)
        self._check_length("chat", text)
        return await self._encode("chat", caller, text, add_special_tokens)

    async def decode(self, caller: str, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of the tokens. Raises Overloaded if too much work of the caller waits."""
        return await self._threads.run(
            caller, len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens)
        )

    async def pieces(self, caller: str, token_ids: Sequence[int]) -> list[str]:
        """Tokens as written in the vocabulary. Raises Overloaded if too much work of the caller waits."""
        return await self._threads.run(caller, len(token_ids), lambda: self.tokenizer.pieces(token_ids))

    async def run(self, caller: str, cost: int, work: Callable[[], T]) -> T:
        """Runs other work of a request, whose time grows with `cost`. Raises Overloaded if too much work of the caller
        waits."""
        return await self._threads.run(caller, cost, work)

    def close(self) -> None:
        """Refuses waiting work. Running work continues to its end."""
        self._threads.close()
        self._template_threads.close()

    async def _encode(self, field: str, caller: str, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of a text. InvalidRequest names `field` if the tokenizer knows no tokens for it."""

        def encode() -> tuple[int, ...]:
            try:
                return self.tokenizer.encode(text, add_special_tokens)
            except Exception as error:
                if type(error) is not Exception:  # the library raises bare Exceptions
                    raise
                raise InvalidRequest(
                    field, f"the model's tokenizer cannot encode the text: {error}"
                ) from error

        if len(text) <= MAX_INLINE_CHARACTERS:
            return encode()
        return await self._threads.run(caller, len(text), encode)

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self.max_characters:
            raise PromptTooLong(
                field,
                f"{TOO_LONG}: {len(text)} characters exceed the model's limit of {self.max_characters}",
            )

    async def _render(self, caller: str, conversation: Conversation, add_generation_prompt: bool) -> str:
        """Renders the chat template. The time limit begins when a thread starts the work."""

        def render() -> str:
            return self.tokenizer.render_chat(conversation, add_generation_prompt)

        try:
            return await self._template_threads.run(
                caller, conversation.num_characters, lambda: run_within(TEMPLATE_TIMEOUT_S, render)
            )
        except TimeoutError:
            raise InvalidRequest(
                "chat", f"the model's chat template took longer than {TEMPLATE_TIMEOUT_S:g} s"
            ) from None
