"""`baton key`: what it prints lets its owner in, and the key appears once."""

import asyncio
import json
from pathlib import Path

import pytest

from baton.clock import VirtualClock
from baton.config import GatewayConfig
from cli.main import USAGE, main
from gateway.auth.authenticator import Authenticator
from gateway.auth.callers import Right


def test_what_it_prints_is_an_entry_of_the_key_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    keys = {}
    for name, flags in (("alice", ()), ("ops", ("--admin",)), ("prometheus", ("--scope", "observe"))):
        assert main(["key", name, *flags]) == 0
        printed = capsys.readouterr()
        keys[name] = printed.err.split()[-1]
        assert keys[name].startswith("baton-")
        assert keys[name] not in printed.out
        with file.open("a") as appended:
            appended.write(printed.out)
    authenticator = Authenticator(GatewayConfig(api_keys_file=str(file)), VirtualClock())
    callers = {name: asyncio.run(authenticator.caller_of([f"Bearer {key}"])) for name, key in keys.items()}
    rights = {name: {right for right in Right if caller.may(right)} for name, caller in callers.items()}
    assert rights == {"alice": {Right.GENERATE}, "ops": set(Right), "prometheus": {Right.OBSERVE}}


@pytest.mark.parametrize("name", ["007", "1.5", "null", "yes", "2026-11-27", "0x10", "1_000"])
def test_a_name_that_yaml_would_take_for_something_else_is_a_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", name]) == 0
    file, printed = tmp_path / "keys.yaml", capsys.readouterr()
    file.write_text(printed.out)
    authenticator = Authenticator(GatewayConfig(api_keys_file=str(file)), VirtualClock())
    caller = asyncio.run(authenticator.caller_of([f"Bearer {printed.err.split()[-1]}"]))
    assert caller.name == name


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice", "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert made["entry"]["name"] == "alice"
    assert printed.err == ""
    assert made["key"] not in str(made["entry"])


def test_a_name_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "a b"]) == USAGE
    assert "API key: name: got 'a b'" in capsys.readouterr().err
