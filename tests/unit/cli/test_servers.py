"""What `baton serve` says when it is ready can be pasted."""

import asyncio
import io
import json
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from baton.clock import VirtualClock
from baton.config import BatonConfig
from cli.commands import servers
from cli.commands.servers import announce
from cli.console import service_console
from cli.main import DONE, USAGE, main
from cluster.serve.following_gateway import Service, WhileReady
from cluster.serve.run import OpenFleet, WhileOpen
from cluster.serve.screen import Screen


@pytest.mark.parametrize(("uses_tls", "scheme"), [(False, "http"), (True, "https")])
def test_a_curl_line_names_the_model(uses_tls: bool, scheme: str) -> None:
    said = io.StringIO()
    service = Service("127.0.0.1:5", "127.0.0.1:8", (), "tiny", uses_tls=uses_tls, asks_for_key=uses_tls)
    announce(service, Screen(Console(file=said, width=80)))
    (line,) = [line.strip() for line in said.getvalue().splitlines() if line.strip().startswith("curl ")]
    _, url, *flags = shlex.split(line)
    assert url == f"{scheme}://127.0.0.1:8/v1/chat/completions"
    assert ("authorization: Bearer KEY" in flags) is uses_tls
    body = json.loads(flags[flags.index("-d") + 1])
    assert body["model"] == "tiny"
    assert body["messages"][0]["role"] == "user"
    assert body["max_tokens"] == 256, "a small model may fill its whole context"


def test_the_lines_have_the_flags_that_the_gateway_asks_for() -> None:
    said = io.StringIO()
    service = Service(
        "127.0.0.1:5",
        "127.0.0.1:8",
        (),
        "tiny",
        uses_tls=True,
        asks_for_certificate=True,
        asks_for_key=True,
    )
    announce(service, Screen(Console(file=said, width=80)))
    _, generate, grpcurl, curl = (line.strip() for line in said.getvalue().splitlines())
    assert "--tls --tls-cert FILE --tls-key FILE --api-key-file FILE " in generate
    assert grpcurl.startswith("grpcurl -cert FILE -key FILE -H 'authorization: Bearer KEY' -d ")
    assert '"sampling_params": {"max_tokens": 256}' in grpcurl
    assert " --cert FILE --key FILE -H 'authorization: Bearer KEY' " in curl


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_the_commands_do_not_call_a_wildcard(host: str) -> None:
    said = io.StringIO()
    announce(Service(f"{host}:5", f"{host}:8", (), "tiny"), Screen(Console(file=said, width=80)))
    ready, *commands = said.getvalue().splitlines()
    assert f"gRPC on {host}:5, HTTP on http://{host}:8 " in ready
    assert [host in command for command in commands] == [False] * 3
    assert "--target localhost:5 " in commands[0]
    assert "curl http://localhost:8/" in commands[2]


async def until_it_waits(said: Awaitable[None]) -> None:
    task = asyncio.ensure_future(said)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("network", "flags"), [({}, []), ({"secret_file": "my secret"}, ["--secret-file", "my secret"])]
)
def test_a_fleet_says_how_a_gateway_finds_it(
    network: dict[str, str],
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def run_fleet(_: BatonConfig, _screen: Screen, while_open: WhileOpen, _reread: object) -> None:
        asyncio.run(until_it_waits(while_open(OpenFleet("10.0.0.1:7", ()))))

    monkeypatch.setattr(servers, "run_fleet", run_fleet)
    config = BatonConfig.from_mapping({"network": network})
    assert servers.serve_fleet(config, False, lambda: config) == DONE
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line.startswith("baton gateway")]
    assert shlex.split(line) == ["baton", "gateway", "--fleet-address", "10.0.0.1:7", *flags]


@pytest.mark.parametrize(
    ("finds", "said"),
    [(True, "the fleet continues without this gateway"), (False, "no fleet was found")],
)
def test_a_stopped_gateway_speaks_of_a_fleet_only_if_it_found_one(
    finds: bool, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_gateway(_: BatonConfig, _screen: Screen, while_ready: WhileReady) -> None:
        if finds:
            asyncio.run(until_it_waits(while_ready(Service("127.0.0.1:5", None, (), "tiny"))))

    monkeypatch.setattr(servers, "run_gateway", run_gateway)
    assert servers.serve_gateway(BatonConfig(), False) == DONE
    assert f"stopped   {said}" in capfd.readouterr().err


def test_without_http_there_is_no_curl_line() -> None:
    said = io.StringIO()
    announce(Service("127.0.0.1:5", None, (), "tiny"), Screen(Console(file=said, width=80)))
    assert "curl http" not in said.getvalue()


def test_a_full_disk_loses_lines_and_does_not_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        announce(Service("127.0.0.1:5", None, (), "tiny"), Screen(service_console()))
        monkeypatch.undo()


def test_a_fleet_reads_its_file_again_after_its_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error there would end the fleet."""
    file, folder, clock = tmp_path / "baton.yaml", tmp_path / "gone", VirtualClock()
    file.write_text("cluster: {ray_address: none}\nengine: {trace_dir: traces}\n")
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("cli.main.SystemClock", lambda: clock)

    def serve_fleet(config: BatonConfig, as_json: bool, reread: Callable[[], BatonConfig]) -> int:
        assert (config.engine.trace_dir, as_json) == (str(folder / "traces"), False)
        folder.rmdir()
        file.write_text("cluster: {ray_address: none, decode: 3}\nengine: {trace_dir: traces}\n")
        clock.advance(60.0)
        assert reread().cluster.decode == 3
        assert reread().engine == config.engine
        return DONE

    monkeypatch.setattr(servers, "serve_fleet", serve_fleet)
    assert main(["fleet", str(file)]) == DONE


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "cluster: {ray_address: none}\n"])
def test_a_fleet_keeps_its_numbers_of_workers_if_its_file_loses_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be half written, or cut off because the disk was full. The defaults would drain most of
    the workers."""
    file, clock = tmp_path / "baton.yaml", VirtualClock()
    file.write_text("cluster: {ray_address: none, decode: 3}\n")
    monkeypatch.setattr("cli.main.SystemClock", lambda: clock)

    def serve_fleet(config: BatonConfig, as_json: bool, reread: Callable[[], BatonConfig]) -> int:
        for content, num_workers in ((text, 3), ("cluster: {ray_address: none, decode: 2}\n", 2)):
            file.write_text(content)
            clock.advance(60.0)
            assert reread().cluster.decode == num_workers
        return DONE

    monkeypatch.setattr(servers, "serve_fleet", serve_fleet)
    assert main(["fleet", str(file)]) == DONE


@pytest.mark.parametrize("command", [["serve", "--ray-address", "none"], ["demo"]], ids=" ".join)
def test_a_folder_that_is_gone_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(command) == USAGE
    assert "the current folder does not exist any more" in capsys.readouterr().err
