"""SamplingParams refuses what cannot work, and names the field."""

import math
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.01),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 100.5),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {math.inf: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
        ("stop", ("x" * 1_001,)),
        ("stop_token_ids", (-5,)),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: must be")


def test_lists_may_be_as_long_as_the_limit_says() -> None:
    SamplingParams(
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
        stop=("x",) * MAX_STOP_STRINGS,
        stop_token_ids=(5,) * MAX_STOP_TOKEN_IDS,
    )


def test_a_repetition_penalty_cannot_make_logits_infinite() -> None:
    assert SamplingParams(repetition_penalty=0.01).repetition_penalty == 0.01
    with pytest.raises(InvalidRequest, match=r"repetition_penalty: must be from 0\.01 to 100, got 0\.0099"):
        SamplingParams(repetition_penalty=0.0099)


def test_eos_ends_a_request_unless_ignored() -> None:
    assert SamplingParams(stop_token_ids=(7,)).stop_ids((2, 3)) == {2, 3, 7}
    assert SamplingParams(stop_token_ids=(7,), ignore_eos=True).stop_ids((2, 3)) == {7}
