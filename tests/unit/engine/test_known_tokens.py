"""Which requests can be sampled only when the tokens of the previous step are known."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.sampling import SamplingParams
from engine.runner import needs_known_tokens

DEPENDS = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
"""Parameters that depend on the request's earlier tokens."""
DEPENDS_NOT = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "min_tokens": 2,
    "logit_bias": {3: 1.0},
    "logprobs": 2,
    "seed": 3,
}


def request(matcher: object = None, **params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(max_tokens=9, **params), matcher=matcher)


@pytest.mark.parametrize(("name", "value"), DEPENDS.items())
def test_a_penalty_needs_all_earlier_tokens(name: str, value: float) -> None:
    assert needs_known_tokens(request(**{name: value}))


def test_a_grammar_needs_all_earlier_tokens() -> None:
    assert needs_known_tokens(request(matcher=object()))


@pytest.mark.parametrize(("name", "value"), DEPENDS_NOT.items())
def test_other_parameters_need_none(name: str, value: object) -> None:
    assert not needs_known_tokens(request(**{name: value}))
