"""What the errors of a configuration say, and what they must not quote."""

import pytest

from baton.config import BatonConfig
from baton.errors import ConfigError


@pytest.mark.parametrize(
    "gateway",
    [
        {"response_store": "redis:/:hush@h/0"},
        {"otlp_endpoint": "grpc://u:hush@h"},
        {"api_keys": "hush"},
        {"api_keys": {"alice": "hush"}},
    ],
)
def test_a_value_that_may_have_a_secret_is_not_quoted(gateway: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.{next(iter(gateway))}: got a value of type") as caught:
        BatonConfig.from_mapping({"gateway": gateway})
    assert "hush" not in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BatonConfig.from_mapping({"gateway": {"grpc_port": -1}, "cluster": {"decode": 0}})
    assert len(str(caught.value).splitlines()) == 2
