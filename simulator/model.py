"""The simulated model: pure functions, so that every schedule and every fault must lead to the same answer."""

import random
from collections.abc import Sequence
from functools import lru_cache

import xxhash

from baton.request import PackedLogprobs, TokenLogprobs

EOS = 2
WRONG = 1
"""The token that is sampled after wrong KV was read. No prompt and no answer contains this token."""
BREAKS_STEPS, KILLS_WORKERS = 60_001, 60_002
"""First tokens of prompts that break every step with them, or end the process that computes them."""


def next_token(prompt: tuple[int, ...], position: int) -> int:
    """The model's token at an output position; sometimes EOS, even at the first position."""
    token_id = 100 + xxhash.xxh32_intdigest(f"{hash(prompt)}@{position}".encode()) % 50_000
    return EOS if token_id % 16 == 0 else token_id


@lru_cache(maxsize=1024)
def answer(prompt: tuple[int, ...], max_tokens: int, max_len: int) -> tuple[int, ...]:
    """The model's whole answer, according to the stop rules."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and len(prompt) + len(tokens) < max_len:
        tokens.append(next_token(prompt, len(tokens)))
        if tokens[-1] == EOS:
            break
    return tuple(tokens)


def guesses(prompt: tuple[int, ...], position: int, most: int) -> tuple[int, ...]:
    """Up to `most` drafts from an output position on; half are right. A pure function, like the model."""
    drafts = []
    for at in range(position, position + most):
        draw = xxhash.xxh32_intdigest(f"{hash(prompt)}@{position} guesses {at}".encode())
        if draw % 5 == 0:
            break
        drafts.append(next_token(prompt, at) + (draw % 2))
    return tuple(drafts)


def forced(prompt: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The tokens that a grammar forces from an output position on; none, or some up to the answer's end."""
    run: list[int] = []
    draw = xxhash.xxh32_intdigest(f"{hash(prompt)}@{position} forces".encode())
    for at in range(position, position + draw % 12 - 6):
        run.append(next_token(prompt, at))
        if run[-1] == EOS:
            break
    return tuple(run)


def prompt_logprobs(prompt: tuple[int, ...], first: int, end: int) -> PackedLogprobs:
    """The log-probabilities of the prompt's own tokens at these positions; the values of all positions differ."""
    return PackedLogprobs.of(
        TokenLogprobs(token_id, -1.0 - first - at, 1, ()) for at, token_id in enumerate(prompt[first:end])
    )


def random_prompt(
    rng: random.Random, stems: Sequence[tuple[int, ...]], min_len: int, max_len: int
) -> tuple[int, ...]:
    """A prompt: a stem that other prompts may share, and a tail of its own."""
    stem = rng.choice(stems)
    length = rng.randrange(max(min_len, len(stem) + 1), max_len)
    return (*stem, *(rng.randrange(1_000, 2_000) for _ in range(length - len(stem))))


def prompt_of_long_answer(
    rng: random.Random, min_len: int, max_len: int, num_answer_tokens: int
) -> tuple[int, ...]:
    """A prompt that shares no stem with any other, and whose answer has at least `num_answer_tokens` tokens."""
    while True:
        prompt = random_prompt(rng, [()], min_len, max_len)
        if EOS not in (next_token(prompt, position) for position in range(num_answer_tokens)):
            return prompt
