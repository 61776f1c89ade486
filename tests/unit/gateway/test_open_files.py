"""How many files a gateway may open: as many as the system allows, and connections must fit."""

import resource
from dataclasses import dataclass

import pytest

from baton.config import GatewayConfig
from baton.errors import ConfigError
from baton.system.open_files import MAX_FILES, raise_open_files
from gateway.open_files import OTHER_FILES, fitted_to_open_files, num_files_needed


@dataclass
class Limits:
    """Stands for the limits of the process. As on macOS, the system refuses more than `most`, whatever `hard` says."""

    soft: int
    hard: int
    most: int = 2**40

    def get(self, _which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def set(self, _which: int, limits: tuple[int, int]) -> None:
        if limits[0] > self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.soft, self.hard = limits


def raised(monkeypatch: pytest.MonkeyPatch, limits: Limits, **config: int | None) -> int:
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    hard = limits.hard
    raise_open_files(num_files_needed(fitted_to_open_files(GatewayConfig.model_validate(config))))
    assert limits.hard == hard
    return limits.soft


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 20_000, 20_000),
        (20_000, 20_000, 20_000),
        (1024, 2**30, MAX_FILES),
        (1024, resource.RLIM_INFINITY, MAX_FILES),
        (2**21, 2**30, 2**21),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_becomes_the_hard_one_within_reason(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int
) -> None:
    assert raised(monkeypatch, Limits(soft, hard)) == expected


def test_a_system_that_allows_less_than_it_says_is_asked_for_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(256, resource.RLIM_INFINITY, most=10_240)
    assert raised(monkeypatch, limits, max_connections=64) == 2 * 64 + OTHER_FILES
    assert "cannot raise the limit of open files to 1048576" in caplog.text


def test_too_many_connections_are_an_error_that_names_a_number_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(1024, 4096)
    with pytest.raises(
        ConfigError,
        match=r"max_connections \(2048\) may need 5120 open files.*may open 4096 files; lower it to 1536, or raise",
    ):
        raised(monkeypatch, limits, max_connections=2048)
    assert limits.soft == 1024
    assert raised(monkeypatch, limits, max_connections=1536) == 4096
    assert raised(monkeypatch, limits, max_connections=3072, http_port=None) == 4096
    with pytest.raises(
        ConfigError, match=r"1112 open files.* 512 other files.* may open 1024 files; lower it to 256"
    ):
        raised(monkeypatch, Limits(256, 1024), max_connections=300)
    assert raised(monkeypatch, Limits(256, 1024), max_connections=256) == 1024
    for config in ({"max_connections": 1}, {}):
        with pytest.raises(
            ConfigError, match="128 other files; this process may open 128 files; raise the hard"
        ):
            raised(monkeypatch, Limits(64, 128), **config)


def test_connections_that_the_configuration_does_not_count_are_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", Limits(1024, 4096).get)
    assert fitted_to_open_files(GatewayConfig()).max_connections == 1536
    assert (
        "lowered gateway.max_connections from 2048 to 1536: this process may open only 4096 files"
        in caplog.text
    )
    for hard, max_connections in ((20_000, 2048), (1024, 256), (200, 36)):
        monkeypatch.setattr(resource, "getrlimit", Limits(100, hard).get)
        assert fitted_to_open_files(GatewayConfig()).max_connections == max_connections
