"""Workloads: sessions of requests, drawn from a seed; knows no router and no scheduler."""

import random
from dataclasses import dataclass

from baton.config import ANONYMOUS


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, and the model's answer to it."""

    user: tuple[int, ...]
    answer: tuple[int, ...]
    think_s: float
    """Pause after the previous answer."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: each turn's prompt is the conversation so far, and the user's new message."""

    name: str
    arrival_s: float
    system: tuple[int, ...]
    turns: tuple[Turn, ...]
    caller: str = ANONYMOUS


def conversations(seed: int, num_sessions: int, sessions_per_s: float, scale: float = 1.0) -> list[Session]:
    """Sessions of three to six turns over four system prompts of 1,200 tokens; `scale` makes everything shorter."""
    rng = random.Random(seed)
    systems = [_tokens(rng, int(1200 * scale)) for _ in range(4)]
    sessions, now = [], 0.0
    for number in range(num_sessions):
        now += rng.expovariate(sessions_per_s)
        turns = tuple(
            Turn(
                _tokens(rng, int(rng.randint(100, 900) * scale)),
                _tokens(rng, int(rng.randint(40, 160) * scale)),
                rng.expovariate(1 / 8.0),
            )
            for _ in range(rng.randint(3, 6))
        )
        sessions.append(Session(f"s{number}", now, rng.choice(systems), turns))
    return sessions


def strangers(seed: int, num_requests: int, requests_per_s: float, scale: float = 1.0) -> list[Session]:
    """Requests that share nothing, with prompts of 200 to 6,000 tokens, most of them short."""
    rng = random.Random(seed)
    sessions, now = [], 0.0
    for number in range(num_requests):
        now += rng.expovariate(requests_per_s)
        length = min(6000, max(200, int(rng.lognormvariate(7.0, 0.9))))
        turn = Turn(_tokens(rng, int(length * scale)), _tokens(rng, int(rng.randint(40, 160) * scale)), 0.0)
        sessions.append(Session(f"s{number}", now, (), (turn,)))
    return sessions


def _tokens(rng: random.Random, number: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(30) for _ in range(max(1, number)))
