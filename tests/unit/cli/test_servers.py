"""What `baton serve` says when it is ready can be pasted."""

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from baton.clock import VirtualClock
from baton.config import BatonConfig
from cli.commands import servers
from cli.commands.servers import announce
from cli.console import service_console
from cli.main import DONE, USAGE, main
from cluster.serve.following_gateway import Service
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


def test_a_fleet_keeps_its_numbers_of_workers_if_its_file_becomes_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults in place of the file's content would drain most of its workers."""
    file, clock = tmp_path / "baton.yaml", VirtualClock()
    file.write_text("cluster: {ray_address: none, decode: 3}\n")
    monkeypatch.setattr("cli.main.SystemClock", lambda: clock)

    def serve_fleet(config: BatonConfig, as_json: bool, reread: Callable[[], BatonConfig]) -> int:
        for text, num_workers in (("", 3), ("cluster: {ray_address: none, decode: 2}\n", 2)):
            file.write_text(text)
            clock.advance(60.0)
            assert reread().cluster.decode == num_workers
        return DONE

    monkeypatch.setattr(servers, "serve_fleet", serve_fleet)
    assert main(["fleet", str(file)]) == DONE


def test_a_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["serve", "--ray-address", "none"]) == USAGE
    assert "the current folder does not exist any more" in capsys.readouterr().err
