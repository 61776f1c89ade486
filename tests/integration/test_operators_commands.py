"""`baton status`, `top`, `drain`, `role`, `rollout`, `flush-cache` as an operator runs them, against a real gateway."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from baton.errors import FleetError
from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cli.commands.operators import running_command
from cli.main import main
from gateway.client import CallBroken
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import GatewayUnderTest, gateway_with, silent

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
LEAVE_ALTERNATE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


def control() -> FakeFleetControl:
    return FakeFleetControl(
        fleet_of(
            replica("w0", WorkerRole.PREFILL, num_starts=1),
            replica("w1", state=ReplicaState.CRASH_LOOP, num_starts=7, last_failure="exit code 1"),
        )
    )


class Command(Protocol):
    async def __call__(
        self, under_test: GatewayUnderTest, *arguments: str
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process, since a process of its own takes half a second to start."""

    async def run(under_test: GatewayUnderTest, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = await asyncio.to_thread(main, [*arguments, "--target", under_test.grpc_target])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


async def test_orders_end_with_a_clear_line(folder: Path, command: Command) -> None:
    fake = control()
    async with gateway_with(folder, {"w0": silent}, {}, control=fake) as under_test:
        role = await command(under_test, "role", "w0", "decode")
        assert (role.returncode, role.stderr) == (DONE, "")
        assert role.stdout.splitlines()[-1].startswith("role      w0 serves as a decode worker")
        rollout = await command(under_test, "rollout")
        assert (rollout.returncode, rollout.stderr) == (DONE, "")
        first, second, last = rollout.stdout.splitlines()
        assert "w0 serves again, 1 of 2" in first
        assert "w1 serves again, 2 of 2" in second
        assert last.startswith("rollout   2 workers restarted")
        drain = await command(under_test, "drain", "w0")
        assert (drain.returncode, drain.stderr) == (DONE, "")
        assert drain.stdout.splitlines()[-1].startswith("drain     w0 is removed")
    assert fake.commands == [("set_role", "w0", "decode"), ("rollout",), ("drain", "w0")]


async def test_json_is_one_object_and_progress_goes_elsewhere(folder: Path, command: Command) -> None:
    async with gateway_with(folder, {"w0": silent}, {}, control=control()) as under_test:
        role = await command(under_test, "role", "w0", "decode", "--json")
        rollout = await command(under_test, "rollout", "--json")
        drain = await command(under_test, "drain", "w0", "--json")
    answers = [json.loads(done.stdout) for done in (role, rollout, drain)]
    assert all(answer.pop("total_s") >= 0 for answer in answers)
    assert answers[0] == {"worker": "w0", "role": "decode"}
    assert answers[1] == {
        "workers": [
            {"worker": "w0", "incarnation": "w0-next-incarnation"},
            {"worker": "w1", "incarnation": "w1-next-incarnation"},
        ]
    }
    assert answers[2] == {"worker": "w0"}
    assert "w0 is removed" in drain.stderr


async def test_a_refusal_is_exit_code_1_and_says_why(folder: Path, command: Command) -> None:
    fake = control()
    fake.refuses = FleetError("w1 is the last of its role")
    async with gateway_with(folder, {}, {}, control=fake) as under_test:
        drain = await command(under_test, "drain", "w1")
        assert (drain.returncode, drain.stdout) == (REFUSED, "")
        assert drain.stderr == "baton drain: FAILED_PRECONDITION: w1 is the last of its role\n"
        unknown = await command(under_test, "role", "w7", "decode", "--json")
        assert (unknown.returncode, unknown.stdout) == (REFUSED, "")
        assert "there is no worker 'w7'; the fleet has w0, w1" in unknown.stderr
        rollout = await command(under_test, "rollout")
        assert rollout.returncode == REFUSED
        assert rollout.stderr.endswith(
            "w1 is the last of its role; restarted before the failure: 1 of 2: w0\n"
        )


async def test_c63_a_flush_names_each_worker_that_keeps_its_cache(folder: Path, command: Command) -> None:
    fake = control()
    async with gateway_with(folder, {"w0": silent}, {}, control=fake) as under_test:
        done = await command(under_test, "flush-cache")
        assert (done.returncode, done.stderr) == (DONE, "")
        assert done.stdout.startswith("flush-cache 2 of 2 workers have emptied their prefix caches")
        fake.in_use = {"w1": "blocks are in use (1 requests run); wait, or use force"}
        refused = await command(
            under_test, "flush-cache", "--worker", "w0", "--worker", "w1", "--force", "--json"
        )
        assert refused.returncode == REFUSED
        assert f"baton flush-cache: w1 keeps its prefix cache: {fake.in_use['w1']}\n" in refused.stderr
        answer = json.loads(refused.stdout)
        assert answer.pop("total_s") >= 0
        assert answer == {
            "workers": [
                {"worker": "w0", "is_flushed": True, "obstacle": ""},
                {"worker": "w1", "is_flushed": False, "obstacle": fake.in_use["w1"]},
            ]
        }
    assert fake.commands == [("flush", "False"), ("flush", "w0", "w1", "True")]


async def test_status_shows_the_worker_that_is_missing(folder: Path, command: Command) -> None:
    async with gateway_with(folder, {"w0": silent}, {}, control=control()) as under_test:
        table = await command(under_test, "status")
        assert "crash loop" in table.stdout
        assert "w1: exit code 1" in table.stdout
        as_json = json.loads((await command(under_test, "status", "--json")).stdout)
    assert {worker["name"]: worker["state"] for worker in as_json["workers"]} == {
        "w0": "ready",
        "w1": "crash_loop",
    }
    documented = {"name", "role", "state", "incarnation", "node", "pid", "kv_blocks", "requests"}
    assert all(documented <= worker.keys() for worker in as_json["workers"])
    assert {"total", "free", "quarantined", "leased"} <= as_json["workers"][1]["kv_blocks"].keys()
    assert as_json["gateway"]["queued"] == 0


async def test_top_away_from_a_terminal_points_to_status(folder: Path, command: Command) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        top = await command(under_test, "top")
    assert (top.returncode, top.stdout) == (USAGE, "")
    assert "`baton status`" in top.stderr


async def test_ctrl_c_ends_the_wait_and_says_that_the_order_stands(folder: Path) -> None:
    fake = control()
    fake.obeys.clear()
    async with gateway_with(folder, {"w0": silent}, {}, control=fake) as under_test:
        target = under_test.grpc_target
        shown = await asyncio.to_thread(Terminal, "drain", "w0", "--target", target)
        try:
            await under_test.until(lambda: fake.commands == [("drain", "w0")])
            await asyncio.to_thread(shown.wait_for, b"(ready, 0 requests)")
            shown.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(shown.process.wait, 20) == INTERRUPTED
            await asyncio.to_thread(
                shown.wait_for, b"the fleet still carries out the command; see `baton status`"
            )
            assert b"is removed" not in shown.shown
        finally:
            await asyncio.to_thread(shown.close)


def test_a_gateway_that_is_lost_during_a_command_may_have_passed_it_on() -> None:
    doubt = "^UNAVAILABLE: Socket closed; the fleet may still carry out the command; see `baton status`$"
    with pytest.raises(CallBroken, match=doubt), running_command("drain", "draining w0", as_json=True):
        raise CallBroken("UNAVAILABLE", "Socket closed")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_that_cannot_be_is_a_usage_error(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=f"^{USAGE}$"):
        main(["top", "--interval", interval])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--interval" in printed.err


class Terminal:
    """A pseudo-terminal of 100 by 30, with a command on it."""

    def __init__(self, *arguments: str) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (30, 100))
        self.mode = termios.tcgetattr(self.theirs)
        self.shown = b""
        self._grew = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text: bytes, count: int = 1) -> None:
        with self._grew:
            came = self._grew.wait_for(lambda: self.shown.count(text) >= count, 60)
        assert came, f"{text!r} did not come {count} times:\n{self.shown.decode()}"

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return
            with self._grew:
                self.shown += piece
                self._grew.notify_all()


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("way", ["q", "SIGINT", "SIGTERM"])
async def test_top_redraws_and_leaves_the_terminal_as_it_was(folder: Path, way: str) -> None:
    def watch(target: str) -> None:
        with terminal("top", "--target", target, "--interval", "0.2") as shown:
            shown.wait_for(b"crash loop", count=3)
            assert not termios.tcgetattr(shown.theirs)[3] & (termios.ICANON | termios.ECHO)
            if way == "q":
                shown.press(b"q")
            else:
                shown.process.send_signal(getattr(signal, way))
            assert shown.process.wait(20) == DONE
            shown.wait_for(LEAVE_ALTERNATE_SCREEN)
            shown.wait_for(SHOW_CURSOR)
            assert shown.shown.rindex(SHOW_CURSOR) > shown.shown.rindex(b"\x1b[?25l")
            assert termios.tcgetattr(shown.theirs) == shown.mode

    async with gateway_with(folder, {"w0": silent}, {}, control=control()) as under_test:
        await asyncio.to_thread(watch, under_test.grpc_target)


async def test_top_outlives_its_gateway_and_finds_its_successor(folder: Path) -> None:
    async with gateway_with(folder, {"w0": silent}, {}, control=control()) as under_test:
        port = under_test.gateway.grpc_port
        target = f"127.0.0.1:{port}"
        shown = await asyncio.to_thread(Terminal, "top", "--target", target, "--interval", "0.2")
        await asyncio.to_thread(shown.wait_for, b"crash loop")
    try:
        await asyncio.to_thread(shown.wait_for, b"the data below is old")
        async with gateway_with(folder, {"w5": silent}, {}, grpc_port=port):
            await asyncio.to_thread(shown.wait_for, b"w5")
        shown.press(b"q")
        assert await asyncio.to_thread(shown.process.wait, 20) == DONE
    finally:
        await asyncio.to_thread(shown.close)


async def test_a_gateway_on_this_machine_is_called_without_a_proxy(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with gateway_with(folder, {"w0": silent}, {}, control=control()) as under_test:
        assert (await command(under_test, "status")).returncode == DONE
    code = await asyncio.to_thread(main, ["status", "--target", "192.0.2.1:50051"])
    assert code == REFUSED
    assert "grpc_proxy is set" in capsys.readouterr().err


def test_top_of_no_gateway_is_refused_before_the_screen_changes() -> None:
    with terminal("top", "--target", "127.0.0.1:9") as shown:
        assert shown.process.wait(30) == REFUSED
        shown.wait_for(b"no gateway answers at 127.0.0.1:9")
        assert LEAVE_ALTERNATE_SCREEN not in shown.shown
