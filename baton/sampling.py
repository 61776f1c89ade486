"""SamplingParams: how the next token is chosen and when a request stops; knows no model and no tokenizer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from baton.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1_000
"""Limit for one stop string, since every new token's text is compared with all of them."""
MAX_STOP_TOKEN_IDS = 128
MIN_REPETITION_PENALTY = 0.01
"""The smallest penalty. A logit that is divided by a much smaller number becomes infinite."""
MAX_LOGIT_BIAS = 1_024
"""The most tokens with a bias."""
MAX_GRAMMAR_CHARACTERS = 100_000
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings for which a model's generation_config.json may name a default, as in vLLM."""


class GrammarKind(Enum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """A context-free grammar in Lark's notation, as llguidance reads it."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The grammar that the whole output must match. A worker validates it by compiling it."""

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        _require(
            "structured_output",
            f"one of {len(self.source)}",
            0 < len(self.source) <= MAX_GRAMMAR_CHARACTERS,
            f"a grammar of 1 to {MAX_GRAMMAR_CHARACTERS} characters",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings, validated on construction.

    Defaults are those of OpenAI and vLLM: plain sampling at temperature 1. Logits pass through, in this order:
    `logit_bias`, penalties, the masks of `min_tokens` and of a structured output, `temperature`, `top_k`, `top_p`,
    `min_p`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    """Of this many tokens at the beginning, none is EOS or a stop token, and a stop string that ends within them has no
    effect."""

    temperature: float = 1.0
    """0 is greedy: the arg max after biases, penalties and masks, whatever `top_k`, `top_p` and `min_p` are."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Drops tokens less likely than `min_p` times the likeliest one."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Positive logits of tokens that occur in the prompt or the output are divided by it, negative ones multiplied
    (CTRL, 2019)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    seed: int | None = None
    """Randomness is a pure function of (seed, position); the gateway fills in a seed if the request has none."""
    logprobs: int | None = None
    """How many of the most likely tokens to report in addition to the sampled one. Their log-probabilities are those
    before any processing. None: no logprobs."""
    prompt_logprobs: int | None = None
    """How many of the most likely tokens to report with each token of the prompt but the first, which nothing precedes.
    None: no logprobs of the prompt."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    structured_output: StructuredOutput | None = None
    """Only tokens that can still lead to a match are sampled, and the end of the match ends the request."""

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, 1 <= self.max_tokens < math.inf, "at least 1")
        most = f"max_tokens ({self.max_tokens})"
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, f"from 0 to {most}")
        _require_within("temperature", self.temperature, 0, 100)
        _require("top_k", self.top_k, 0 <= self.top_k < math.inf, "0 (every token) or more")
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and up to 1")
        _require_within("min_p", self.min_p, 0, 1)
        _require_within("presence_penalty", self.presence_penalty, -2, 2)
        _require_within("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100)
        _require_at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "of at most {} tokens")
        for token_id, bias in self.logit_bias.items():
            _require("logit_bias", token_id, 0 <= token_id < math.inf, "keyed by token ids, 0 or more")
            _require_within("logit_bias", bias, -100, 100)
        if self.seed is not None:
            _require_within("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if (num_top := getattr(self, name)) is not None:
                _require_within(name, num_top, 0, MAX_LOGPROBS)
        _require_at_most("stop", len(self.stop), MAX_STOP_STRINGS, "at most {} strings")
        _require("stop", "an empty one", all(self.stop), "non-empty strings")
        longest = max(map(len, self.stop), default=0)
        allowed = f"up to {MAX_STOP_CHARACTERS} characters each"
        _require("stop", f"one of {longest}", longest <= MAX_STOP_CHARACTERS, allowed)
        _require_at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "at most {} tokens")
        are_ids = all(token_id >= 0 for token_id in self.stop_token_ids)
        _require("stop_token_ids", list(self.stop_token_ids), are_ids, "0 or more")
        if self.structured_output is not None:
            allowed = "false with a structured output, which ends by itself"
            _require("ignore_eos", True, not self.ignore_eos, allowed)
            _require("min_tokens", self.min_tokens, self.min_tokens == 0, "0 with a structured output")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """The token ids that end this request, given the model's end-of-sequence tokens."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))


def _require_within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        _refuse(name, value, f"from {low} to {high}")


def _require_at_most(name: str, count: int, most: int, allowed: str) -> None:
    """Refuses a field whose `count` is above `most`. `allowed`: the text of the error, with braces in place of the
    limit."""
    if count > most:
        _refuse(name, count, allowed.format(most))


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        _refuse(name, value, allowed)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(name, f"must be a finite number, got {value}")
    raise InvalidRequest(name, f"must be {allowed}, got {value}")
