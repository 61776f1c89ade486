"""Random workloads for schedulers, each made from a seed.

Knows no scheduler, and needs only Python itself.
"""

import random
from dataclasses import asdict, dataclass, fields
from typing import Any
from zlib import crc32

EOS = 2
NUM_TOKEN_IDS = 40
"""A small number, so that requests end by chance, and unrelated prompts sometimes share a block of one
token."""

Piece = tuple[str, int]
"""The name of a stream, and how many of its first tokens are used. A stream is a shared text, a request's own
question, or a request's answer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the engine that gets the workload. All names but the last four are those of `SchedulerConfig`."""

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    block_size: int
    num_blocks: int
    max_model_len: int
    num_speculative_tokens: int = 0
    """The most drafts that a request may have in one step."""
    num_full: int = 1
    """Number of KV groups with full attention. This and the next two names are those of `KVGroups`."""
    num_windowed: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, with the times of its arrival and of its client's departure."""

    request_id: str
    arrival_step: int
    prompt: tuple[Piece, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    abort_step: int | None = None
    draft_quality: float = 0.0
    """The probability that a draft is right."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return [token_at(stream, position) for stream, length in self.prompt for position in range(length)]

    def drafts_at(self, position: int, most: int) -> list[int]:
        """Guesses the request's tokens from `position` on: up to `most` drafts, as a pure function."""
        rng = random.Random(f"{self.request_id}~{position}")
        ahead = range(position, position + rng.randrange(most + 1))
        return [token_at(self.request_id, at) + (rng.random() >= self.draft_quality) for at in ahead]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, and the settings of the engine."""

    seed: int
    settings: Settings
    requests: tuple[RequestSpec, ...]

    @property
    def kind(self) -> str:
        """The kind of the workload.

        `priority-ties` is the priority policy with requests of equal priority and arrival time. `drafts` and
        `windows` are any policy with drafts or with windows.
        """
        if self.settings.num_speculative_tokens:
            return "drafts"
        if self.settings.num_windowed:
            return "windows"
        ranks = [(request.priority, request.arrival_time) for request in self.requests]
        has_ties = self.settings.policy == "priority" and len(set(ranks)) < len(ranks)
        return self.settings.policy + ("-ties" if has_ties else "")

    def to_json(self) -> dict[str, Any]:
        """The workload as JSON, without fields that have their default."""
        requests = [_without_defaults(request) for request in self.requests]
        return {"seed": self.seed, "settings": _without_defaults(self.settings), "requests": requests}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Workload":
        requests = tuple(
            RequestSpec(
                **spec
                | {"prompt": tuple((stream, length) for stream, length in spec["prompt"])}
                | {"stop_token_ids": tuple(spec.get("stop_token_ids", ()))}
            )
            for spec in values["requests"]
        )
        return cls(values["seed"], Settings(**values["settings"]), requests)


def _without_defaults(values: Settings | RequestSpec) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(values)}
    return {name: value for name, value in asdict(values).items() if value != defaults[name]}


def token_at(stream: str, position: int) -> int:
    return crc32(f"{stream}@{position}".encode()) % NUM_TOKEN_IDS


def make_workload(seed: int) -> Workload:
    """A workload from its seed. The pool has little more than the longest request needs; all switches vary.

    Every request can reach its end in the pool, and its `min_tokens` within the context. Otherwise V1 would
    run for ever.
    """
    rng = random.Random(seed)
    max_model_len = rng.choice([40, 64, 96])
    requests: list[RequestSpec] = []
    stems = [(f"s{number}", rng.randrange(1, 40)) for number in range(3)]
    has_ties, step = rng.random() < 0.3, 0
    for number in range(rng.randrange(2, 13)):
        step += rng.choice([0, 0, 0, 1, 3])
        prompt = clip(_make_prompt(rng, number, stems, requests), max_model_len - 1)
        num_prompt_tokens = sum(length for _, length in prompt)
        max_tokens = rng.randrange(1, 25)
        most_min_tokens = min(max_tokens, max_model_len - num_prompt_tokens)
        requests.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_step=step,
                prompt=prompt,
                max_tokens=max_tokens,
                min_tokens=rng.randrange(most_min_tokens + 1) if rng.random() < 0.3 else 0,
                stop_token_ids=rng.choice([(), (), (3,), (4, 5)]),
                ignore_eos=rng.random() < 0.3,
                priority=rng.randrange(3),
                arrival_time=float(number // 3 if has_ties else number),
                cache_salt=rng.choice([None, None, None, "salt"]),
                abort_step=step + rng.randrange(20) if rng.random() < 0.1 else None,
            )
        )
    return Workload(seed, _make_settings(rng, max_model_len, requests), tuple(requests))


def _make_prompt(
    rng: random.Random, number: int, stems: list[Piece], earlier: list[RequestSpec]
) -> list[Piece]:
    """A shared text and a new question, or an earlier request's conversation and one more question."""
    question = (f"q{number}", rng.randrange(1, 20))
    if earlier and rng.random() < 0.2:
        previous = rng.choice(earlier)
        return [*previous.prompt, (previous.request_id, rng.randrange(1, 1 + previous.max_tokens)), question]
    stem, length = rng.choice(stems)
    return [(stem, rng.choice([length, 1 + rng.randrange(length)])), question]


def clip(prompt: list[Piece], max_tokens: int) -> tuple[Piece, ...]:
    """The first `max_tokens` tokens of the prompt."""
    clipped: list[Piece] = []
    for stream, length in prompt:
        length = min(length, max_tokens)
        max_tokens -= length
        clipped += [(stream, length)] if length else []
    return tuple(clipped)


def _make_settings(rng: random.Random, max_model_len: int, requests: list[RequestSpec]) -> Settings:
    """Settings that both schedulers accept.

    Both refuse a budget below the context if prompts are not split. V1 refuses a budget below
    `max_num_seqs`.
    """
    block_size, max_num_seqs = rng.choice([1, 4, 8, 16]), rng.choice([1, 2, 4, 8, 16])
    enable_chunked_prefill = rng.random() < 0.65
    budget = max(max_num_seqs, rng.choice([4, 16, 33, 64, 200]))
    prompts = [sum(length for _, length in spec.prompt) for spec in requests]
    lengths = [
        max(prompt + 1, min(max_model_len, prompt + spec.max_tokens) - 1)  # the last token needs no slot
        for prompt, spec in zip(prompts, requests, strict=True)
    ]
    num_needed = -(-max(lengths) // block_size)
    return Settings(
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if enable_chunked_prefill else max_model_len + rng.randrange(16),
        long_prefill_token_threshold=rng.choice(
            [0, 0, 3, 10, 24] if enable_chunked_prefill else [0, 0, 0, 24]
        ),
        enable_prefix_caching=rng.random() < 0.65,
        enable_chunked_prefill=enable_chunked_prefill,
        block_size=block_size,
        num_blocks=1 + num_needed + rng.randrange(1 + rng.choice([1, 1, 4]) * num_needed),
        max_model_len=max_model_len,
    )


def workload_by_hand(number: int, requests: list[RequestSpec], **settings: Any) -> Workload:
    """A workload with room for all requests, and without limits, except for `settings`.

    `settings` must contain at least `num_blocks` and `max_model_len`.
    """
    return Workload(
        -number,
        Settings(
            **{
                "policy": "fcfs",
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "long_prefill_token_threshold": 0,
                "enable_prefix_caching": True,
                "enable_chunked_prefill": True,
                "block_size": 4,
                **settings,
            }
        ),
        tuple(requests),
    )
