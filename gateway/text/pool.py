"""TokenizerPool: runs a tokenizer within bounds, on threads of its own, so that the event loop is not blocked."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import InvalidRequest, PromptTooLong
from gateway.places import Places
from gateway.text.time_limit import run_within
from gateway.text.tokenizer import ChatMessage, Tokenizer

T = TypeVar("T")

MAX_INLINE_CHARACTERS = 2_000
"""Shorter texts are tokenised at once: a thread would take longer to start on them."""
NUM_THREADS = 4
NUM_TEMPLATE_THREADS = 2
"""Separate threads, so that texts never wait behind a slow template."""
MAX_WAITING = 256
"""Limit for texts and conversations being processed or waiting for a thread; further ones are refused."""
RETRY_AFTER_S = 1.0
TEMPLATE_TIMEOUT_S = 5.0
"""Time limit for a template on one conversation. A template is a program, and may not end."""


class TokenizerPool:
    """For use from one event loop. Cancelled calls release their place."""

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, template_timeout_s: float = TEMPLATE_TIMEOUT_S
    ) -> None:
        """Texts that could not fit into `max_tokens`, even if all their tokens were the longest, are not tokenised at
        all.
        """
        self.tokenizer = tokenizer
        self.max_characters = max_tokens * tokenizer.longest_token
        self._template_timeout_s = template_timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._template_threads = ThreadPoolExecutor(NUM_TEMPLATE_THREADS, thread_name_prefix="chat-template")
        self._places = Places(MAX_WAITING, "prompts wait to be tokenised", RETRY_AFTER_S)

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """PromptTooLong names `prompt`; Overloaded if too many wait already."""
        self._check_length("prompt", text)
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        with self._places.take():
            return await self._on(self._threads, lambda: self.tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Templates write special tokens themselves. InvalidRequest names `chat`; Overloaded if too many wait
        already.
        """
        with self._places.take():
            text = await self._render(messages, add_generation_prompt)
            self._check_length("chat", text)
            return await self._on(self._threads, lambda: self.tokenizer.encode(text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Overloaded if too many wait already."""
        with self._places.take():
            return await self._on(
                self._threads, lambda: self.tokenizer.decode(token_ids, skip_special_tokens)
            )

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as written in the vocabulary; Overloaded if too many wait already."""
        with self._places.take():
            return await self._on(self._threads, lambda: self.tokenizer.pieces(token_ids))

    def close(self) -> None:
        """Running work ends by itself; waiting work does not begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._template_threads.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self.max_characters:
            raise PromptTooLong(
                field,
                f"{len(text)} characters exceed the model's limit of {self.max_characters}",
            )

    async def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        """The time counts from when a thread begins."""

        def render() -> str:
            return self.tokenizer.render_chat(messages, add_generation_prompt)

        timeout_s = self._template_timeout_s
        try:
            return await self._on(self._template_threads, lambda: run_within(timeout_s, render))
        except TimeoutError:
            raise InvalidRequest(
                "chat", f"the model's chat template took longer than {timeout_s:g} s"
            ) from None

    def _on(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(threads, work)
