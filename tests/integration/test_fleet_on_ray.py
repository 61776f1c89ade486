"""A fleet on Ray whose parts are killed, stopped, drained and restarted while it serves."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.client import GatewayClient
from tests.factories.models import make_model_dir
from tests.factories.serving import ServeProcess, baton, serving, workers_of

pytestmark = pytest.mark.slow

SMALL = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-mib", "16", "--num-threads", "1")
HEALING_TIMEOUT_S = 90.0
PAUSE_S = 0.25
"""Between questions of a client, which would otherwise keep both cores busy."""
HANG_ON_SIGNAL = Path(__file__).parent.parent / "factories" / "hang_on_signal"


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One prefill and two decode workers. The tests share this fleet; each test leaves it complete."""
    folder = tmp_path_factory.mktemp("fleet")
    model = make_model_dir(folder / "tiny", max_position_embeddings=16384)
    config = folder / "baton.yaml"
    cluster = {"prefill": 1, "decode": 2, "unresponsive_timeout_s": 3.0, "drain_timeout_s": 0.2}
    config.write_text(json.dumps({"cluster": cluster, "kv_transfer": {"lease_s": 2.0}}))
    path = os.pathsep.join(filter(None, [str(HANG_ON_SIGNAL), os.environ.get("PYTHONPATH", "")]))
    with serving(str(config), "--model", str(model), *SMALL, environment={"PYTHONPATH": path}) as serve:
        serve.target = serve.wait_ready()["target"]  # type: ignore[attr-defined]
        yield serve


@pytest.fixture
def target(serve: ServeProcess) -> str:
    return str(serve.target)  # type: ignore[attr-defined]


def until_whole(target: str, *, not_among: frozenset[str] = frozenset(), count: int = 3) -> dict[str, Any]:
    """The workers by name, once all serve, none of them one of these incarnations."""
    deadline = time.monotonic() + HEALING_TIMEOUT_S
    while time.monotonic() < deadline:
        workers = {worker["name"]: worker for worker in workers_of(target)}
        states = [worker["state"] for worker in workers.values()]
        incarnations = {worker["incarnation"] for worker in workers.values()}
        if states == ["ready"] * count and not incarnations & not_among:
            return workers
        time.sleep(0.1)
    raise AssertionError(f"the fleet did not heal: {workers}")


def ask(target: str, num_tokens: int = 5) -> list[int]:
    return asyncio.run(answer(target, num_tokens))


async def answer(target: str, num_tokens: int) -> list[int]:
    token_ids: list[int] = []
    sampling = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    async with GatewayClient(target) as client:
        async for event in client.generate(text="Why is the sky blue?", sampling=sampling):
            token_ids += event.token_ids
    assert len(token_ids) == num_tokens
    return token_ids


def controller_of(serve: ServeProcess) -> psutil.Process:
    (found,) = [p for p in serve.descendants() if "ControllerActor" in " ".join(p.cmdline())]
    return found


def test_a_killed_controller_takes_up_the_workers_it_finds_and_requests_go_on_meanwhile(
    serve: ServeProcess, target: str
) -> None:
    before = until_whole(target)
    tokens = ask(target)
    former = controller_of(serve)
    former.kill()
    assert ask(target) == tokens
    former.wait(30)
    deadline = time.monotonic() + HEALING_TIMEOUT_S
    while not [p for p in serve.descendants() if "ControllerActor" in " ".join(p.cmdline())]:
        assert time.monotonic() < deadline
    # The new controller answers a command.
    drained = baton("drain", "--target", target, "w9")
    assert drained.returncode == 1
    assert "there is no worker 'w9'; the fleet has w0, w1, w2" in drained.stderr
    after = until_whole(target)
    assert {name: worker["incarnation"] for name, worker in after.items()} == {
        name: worker["incarnation"] for name, worker in before.items()
    }
    os.kill(after["w1"]["pid"], signal.SIGKILL)  # and it watches them
    until_whole(target, not_among=frozenset({after["w1"]["incarnation"]}))
    reason = "its process died, for example by a crash, by SIGKILL or for lack of memory"
    assert f"worker w1 (decode) died: {reason}\n" in serve.stderr


def test_a_stopped_controller_is_killed_and_restarted(serve: ServeProcess, target: str) -> None:
    before = until_whole(target)
    former = controller_of(serve)
    former.suspend()
    ask(target)
    former.wait(HEALING_TIMEOUT_S)
    assert "there is no worker 'w9'" in baton("drain", "--target", target, "w9").stderr
    after = until_whole(target)
    assert {worker["incarnation"] for worker in after.values()} == {
        worker["incarnation"] for worker in before.values()
    }


def test_c54_a_stopped_worker_is_killed_a_hung_one_ends_itself_and_both_are_replaced(
    serve: ServeProcess, target: str
) -> None:
    before = until_whole(target)
    tokens, hung, stopped = ask(target), before["w0"], before["w2"]
    processes = [psutil.Process(worker["pid"]) for worker in (hung, stopped)]
    processes[1].suspend()
    os.kill(hung["pid"], signal.SIGUSR2)
    assert ask(target) == tokens, "w0 gets it, and hangs in its first step"
    healed = until_whole(target, not_among=frozenset({hung["incarnation"], stopped["incarnation"]}))
    assert all(healed[name]["pid"] != before[name]["pid"] for name in ("w0", "w2"))
    psutil.wait_procs(processes, 30)
    serve.wait_for_text("its engine has made no progress for ")  # by its heartbeat, or from the controller


def test_a_rollout_restarts_all_without_a_failed_request(target: str) -> None:
    before = until_whole(target)
    expected = ask(target, 40)
    rollout = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "rollout", "--target", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    answers = []
    with ThreadPoolExecutor(2) as clients:
        while is_running(rollout, PAUSE_S):
            answers += list(clients.map(lambda _: ask(target, 40), range(2)))
    output = rollout.communicate()[0]
    assert rollout.returncode == 0, output
    assert answers
    assert all(answer == expected for answer in answers)
    after = until_whole(target)
    assert not {w["incarnation"] for w in before.values()} & {w["incarnation"] for w in after.values()}


def is_running(process: subprocess.Popen[str], pause_s: float) -> bool:
    """Whether the process still runs after the pause. If it has ended, returns before the pause is over."""
    try:
        process.wait(pause_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_c50_a_drained_worker_is_gone_for_good(serve: ServeProcess, target: str) -> None:
    before = until_whole(target)
    done = baton("drain", "--target", target, "w2")
    assert done.returncode == 0, done.stderr
    assert set(until_whole(target, count=2)) == {"w0", "w1"}
    assert not psutil.pid_exists(before["w2"]["pid"])
    refused = baton("drain", "--target", target, "w1")
    assert refused.returncode == 1
    assert "no decode worker serves" in refused.stderr
    ask(target)
    controller_of(serve).suspend()  # the command does not wait for a controller that does not answer
    serve.interrupt()
    interrupted = time.monotonic()
    assert serve.wait_gone() == 0
    assert time.monotonic() - interrupted < 30.0
