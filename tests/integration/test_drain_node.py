"""`baton drain --node` as a pod's last command runs it, at the control server, with the cluster's secret."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from baton.messages.control_codec import failure, read_call, versions_differ
from baton.system.secret import SECRET_VARIABLE
from cli.main import DONE, REFUSED, USAGE, main
from cluster.control_api.server import OpenCalls
from tests.factories.control_api import control_server
from tests.factories.fleet import FakeLauncher, fleet, fleet_config
from tests.factories.security import OTHER_SECRET, SECRET


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)


async def drain(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["drain", *arguments])


async def test_a_node_is_emptied_and_whoever_asks_again_is_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, launcher = fleet_config(), FakeLauncher()
    launcher.addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    async with fleet(config, launcher) as tested:
        await tested.all_serve(3)
        async with control_server(config, tested.controller) as server:
            at_server = ("--fleet-address", server.address)
            assert await drain("--node", "10.0.0.1", "--timeout", "20", *at_server) == DONE
            assert "node 10.0.0.1 has no workers now, and gets no new ones" in capsys.readouterr().out
            assert [incarnation.node for incarnation in launcher.alive if incarnation.node == "n1"] == []
            assert await drain("--node", "10.0.0.1", "--json", *at_server) == DONE
            assert json.loads(capsys.readouterr().out)["node"] == "10.0.0.1"
            assert await drain("--node", "10.0.0.9", *at_server) == REFUSED
            assert "its nodes are: n1 (10.0.0.1), n2 (10.0.0.2)" in capsys.readouterr().err


async def test_it_takes_no_longer_than_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    config, launcher = fleet_config(), FakeLauncher()
    launcher.addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    async with fleet(config, launcher) as tested:
        await tested.all_serve(3)
        launcher.latest("w1").may_drain.clear()
        async with control_server(config, tested.controller) as server:
            at_server = ("--fleet-address", server.address)
            assert await drain("--node", "n1", "--timeout", "0.3", *at_server) == REFUSED
        assert "within 0.3 s" in capsys.readouterr().err
        launcher.latest("w1").may_drain.set()


async def test_a_fleet_of_another_secret_is_an_error_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fleet_config()
    async with fleet(config) as tested, control_server(config, tested.controller) as server:
        monkeypatch.setenv(SECRET_VARIABLE, OTHER_SECRET.text)
        assert await drain("--node", "n1", "--fleet-address", server.address) == REFUSED
    assert "refused the connection" in capsys.readouterr().err


async def test_a_fleet_of_another_version_is_an_error_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: OpenCalls, __: bytes, frames: list[bytes]) -> bytes:
        return failure(read_call(frames[0]).number, versions_differ(99))

    monkeypatch.setattr(OpenCalls, "open_call", refuse)
    config = fleet_config()
    async with fleet(config) as tested, control_server(config, tested.controller) as server:
        assert await drain("--node", "n1", "--timeout", "3600", "--fleet-address", server.address) == REFUSED
    assert "version 99 of the control plane" in capsys.readouterr().err


async def test_a_control_server_that_never_answers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert await drain("--node", "n1", "--timeout", "0.3", "--fleet-address", "127.0.0.1:9") == REFUSED
    assert "the control server at 127.0.0.1:9 has not answered" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "is_allowed"), [("3600", True), ("3601", False)])
def test_the_longest_timeout_is_the_gateways(
    seconds: str, is_allowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) if not is_allowed else nullcontext():
        main(["drain", "--node", "n1", "--timeout", seconds, "--target", "127.0.0.1:9"])
    assert ("at most 3600" in capsys.readouterr().err) is not is_allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either WORKER or --node"),
        (["w1", "--node", "n1"], "either WORKER or --node"),
        (["w1", "--timeout", "5"], "need --node"),
        (["w1", "--fleet-address", "a:1"], "need --node"),
        (["--node", "n1", "--secret-file", "x"], "--secret-file needs --fleet-address"),
        (
            ["--node", "n1", "--fleet-address", "nowhere"],
            "baton drain: --fleet-address: got 'nowhere'; use HOST:PORT",
        ),
        (["--node", "n1", "--fleet-address", "a:1", "--target", "b:2"], "--target and --fleet-address both"),
        *[
            (["--node", "n1", "--fleet-address", "a:1", *flag], f"{flag[0]} is only for a gateway")
            for flag in (
                ["--api-key", "k"],
                ["--api-key-file", "f"],
                ["--tls"],
                ["--tls-ca", "f"],
                ["--tls-key", "f"],
            )
        ],
    ],
)
def test_what_does_not_go_together_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", *arguments]) == USAGE
    assert message in capsys.readouterr().err
