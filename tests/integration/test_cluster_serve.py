"""The command as a user meets it: real Ray, real workers, real gRPC, and nothing left afterwards."""

import ipaddress
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.on_ray.session import _longest_socket
from tests.factories.models import make_model_dir
from tests.factories.serving import (
    ServeProcess,
    baton,
    listening_addresses,
    serving,
    shared_memory_of,
    workers_of,
)

pytestmark = pytest.mark.slow

HEALING_TIMEOUT_S = 90.0
TRANSIENT_S = 30.0
"""Another Ray that starts meanwhile has a name in shared memory for a moment."""
SMALL = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-mib", "16", "--num-threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_dir(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=16384))


@pytest.fixture(scope="module")
def shared(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServeProcess, dict[str, Any]]]:
    """One deployment for the tests that only talk to it, and for the one that ends it.

    It starts in a folder of strangers, from which nothing may be imported. By default, Ray's workers would do so.
    """
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "torch.py").write_text("raise ImportError('imported from the current folder')")
    with ExitStack() as stack:
        with chdir(folder):
            serve = stack.enter_context(serving("--model", model, *SMALL))
        ready = serve.wait_ready()
        yield serve, ready


@pytest.fixture
def target(shared: tuple[ServeProcess, dict[str, Any]]) -> str:
    return str(shared[1]["target"])


def status_of(target: str) -> dict[str, Any]:
    done = baton("status", "--target", target, "--json")
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def test_the_ready_text_shows_how_to_talk_to_it(
    shared: tuple[ServeProcess, dict[str, Any]], target: str
) -> None:
    serve, ready = shared
    assert {worker["role"] for worker in ready["workers"]} == {"prefill", "decode"}
    for expected in (
        "tiny in float32",
        "/session_latest/logs",
        f"baton generate --target {target}",
        "grpcurl -plaintext",
        "w0 (prefill, pid",
        "w1 (decode, pid",
    ):
        serve.wait_for_text(expected)  # the text may come a moment after the line on stdout


def test_everything_listens_on_loopback_only(shared: tuple[ServeProcess, dict[str, Any]]) -> None:
    serve, ready = shared
    addresses = listening_addresses([*serve.descendants()])
    hosts = {ipaddress.ip_address(host.removeprefix("::ffff:")) for host, _ in addresses}
    assert all(host.is_loopback for host in hosts), hosts
    ports = {int(worker["request_address"].rpartition(":")[2]) for worker in ready["workers"]}
    assert ports <= {port for _, port in addresses}


def test_a_start_pays_for_nothing_that_is_not_used(shared: tuple[ServeProcess, dict[str, Any]]) -> None:
    serve, _ = shared
    processes = "\n".join(" ".join(process.cmdline()) for process in serve.descendants())
    assert "raylet" in processes
    assert not [name for name in ("monitor.py", "log_monitor.py", "dashboard.py") if name in processes]
    if sys.platform == "linux":
        assert "libtorch" not in Path(f"/proc/{serve.process.pid}/maps").read_text(encoding="utf-8")


def test_workers_have_the_priority_of_the_command_itself(shared: tuple[ServeProcess, dict[str, Any]]) -> None:
    """Ray's own choice is niceness 15, which starves a worker beside any other busy program."""
    serve, ready = shared
    niceness = {psutil.Process(worker["pid"]).nice() for worker in ready["workers"]}
    assert niceness == {psutil.Process(serve.process.pid).nice()}


def test_other_users_cannot_enter_the_folder_of_a_private_ray(
    shared: tuple[ServeProcess, dict[str, Any]],
) -> None:
    """Ray lets every user write to the folder that it is given. So this folder is within another one."""
    serve, _ = shared
    (folder,) = serve.temporary.glob("baton-ray-*")
    assert folder.stat().st_mode & 0o7777 == 0o700
    (logs,) = folder.glob("*/session_latest/logs")
    serve.wait_for_text(str(logs))
    assert logs.is_dir()
    names = [str(path) for path in folder.rglob("*") if path.is_socket()]
    assert names
    assert max(map(len, names)) <= len(_longest_socket(str(serve.temporary)))


def test_generate_prints_one_object_with_everything_in_it(target: str) -> None:
    """The answer has so many tokens that the prefill worker reports the hand-over before the last one."""
    done = baton(
        "generate", "--target", target, "--json", "--max-tokens", "100", "--ignore-eos", "What is a block?"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) == 100
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage.pop("prompt_tokens") > usage.pop("cached_tokens") >= 0
    assert usage == {
        "completion_tokens": 100,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "reasoning_tokens": 0,
    }
    timing = answer["timing"]
    assert {
        "ttft_s",
        "itl_s",
        "queue_s",
        "prefill_s",
        "transfer_s",
        "transfer_bytes",
        "total_s",
    } <= timing.keys()
    assert len(timing["itl_s"]) == 99
    assert 0 < timing["ttft_s"] < timing["total_s"]
    assert timing["transfer_bytes"] > 0
    check_transfers(timing)
    assert answer["placement"] == {"mode": "disaggregated", "prefill": "w0", "decode": "w1", "attempts": 1}


def check_transfers(timing: dict[str, Any]) -> None:
    """Checks that both ends report the hand-over, with events in order and within the duration of the request."""
    transfers = {transfer["worker"]: transfer for transfer in timing["transfers"]}
    assert [(name, end["role"], end["peer"]) for name, end in sorted(transfers.items())] == [
        ("w0", "producer", "w1"),
        ("w1", "consumer", "w0"),
    ]
    names = {"w1": ["begun", "asked", "first_piece", "verified"]}
    names["w0"] = ["begun", "prefilled", "released", "first_piece"]
    for worker, transfer in transfers.items():
        assert sorted(event["name"] for event in transfer["events"]) == sorted(names[worker])
        times = [event["at_s"] for event in transfer["events"]]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] < timing["total_s"]
        assert transfer["bytes"] == timing["transfer_bytes"]
        assert (transfer["attempt"], transfer["transport"]) == (1, timing["transport"])
    assert transfers["w0"]["exposed_s"] > 0


def test_the_mode_is_the_users_and_the_tokens_are_the_same(target: str) -> None:
    arguments = (
        "--json",
        "--max-tokens",
        "20",
        "--seed",
        "3",
        "--temperature",
        "0.9",
        "--ignore-eos",
        "Once upon",
    )
    answers = {
        mode: json.loads(baton("generate", "--target", target, "--mode", mode, *arguments).stdout)
        for mode in ("disaggregated", "local")
    }
    assert answers["local"]["placement"] == {"mode": "local", "prefill": None, "decode": "w1", "attempts": 1}
    assert answers["local"]["token_ids"] == answers["disaggregated"]["token_ids"]


def test_generate_streams_the_same_text_that_json_has(target: str) -> None:
    arguments = ("generate", "--target", target, "--max-tokens", "12", "--raw", "The cache is")
    streamed = baton(*arguments)
    whole = baton(*arguments, "--json")
    assert streamed.returncode == whole.returncode == 0
    assert streamed.stdout == json.loads(whole.stdout)["text"] + "\n"


def test_what_the_server_refuses_is_exit_code_1(target: str) -> None:
    done = baton("generate", "--target", target, "--temperature", "-1", "hello")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "INVALID_ARGUMENT" in done.stderr
    assert "temperature" in done.stderr


def test_c63_prefix_caches_are_left_unread_and_flushed_and_a_request_has_its_own_context(target: str) -> None:
    def ask(*flags: str) -> dict[str, Any]:
        prompt = "The cache is the baton. " * 9
        done = baton("generate", "--target", target, "--json", "--raw", "--ignore-eos", *flags, prompt)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    usual = ask("--max-tokens", "9")
    num_cached = ask("--max-tokens", "9")["usage"]["cached_tokens"]
    assert num_cached > usual["usage"]["cached_tokens"]
    unread = ask("--max-tokens", "9", "--skip-reading-prefix-cache")
    assert (unread["usage"]["cached_tokens"], unread["token_ids"]) == (0, usual["token_ids"])
    short = ask("--max-model-len", str(usual["usage"]["prompt_tokens"] + 3))
    assert (short["finish_reason"], short["token_ids"]) == ("length", usual["token_ids"][:3])
    assert short["usage"]["cached_tokens"] == num_cached
    give_up_at = time.monotonic() + 60.0
    while (flushed := baton("flush-cache", "--target", target, "--json")).returncode != 0:
        assert "blocks are in use" in flushed.stderr, "the last hand-over may not be released yet"
        assert time.monotonic() < give_up_at
    assert [worker["is_flushed"] for worker in json.loads(flushed.stdout)["workers"]] == [True, True]
    assert ask("--max-tokens", "9")["usage"]["cached_tokens"] == 0


def test_status_shows_every_worker_at_rest(shared: tuple[ServeProcess, dict[str, Any]], target: str) -> None:
    status = status_of(target)
    assert status["model"] == "tiny"
    assert status["gateway"]["in_flight"] == status["gateway"]["queued"] == 0
    pids = {worker["name"]: worker["pid"] for worker in shared[1]["workers"]}
    assert {worker["name"]: worker["pid"] for worker in status["workers"]} == pids
    for worker in status["workers"]:
        blocks = worker["kv_blocks"]
        assert worker["state"] == "ready"
        assert blocks["free"] == blocks["total"] > 0
        assert blocks["leased"] == blocks["quarantined"] == 0
        assert worker["requests"] == {"running": 0, "waiting": 0, "waiting_for_remote_kvs": 0}


def test_status_is_a_table_for_people(target: str) -> None:
    done = baton("status", "--target", target)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows if "ready" in row] == [
        ["w0", "prefill", "ready"],
        ["w1", "decode", "ready"],
    ]


def test_a_dead_worker_is_replaced_and_ctrl_c_leaves_nothing_behind(
    shared: tuple[ServeProcess, dict[str, Any]], target: str
) -> None:
    """Meanwhile, other workers take over. In the end, nothing is left of the worker that died, either. This
    is the last test that uses the shared deployment."""
    serve, ready = shared
    pids = {worker["name"]: worker["pid"] for worker in ready["workers"]}
    shared_memory = shared_memory_of(serve.descendants())
    os.kill(pids["w0"], signal.SIGKILL)
    done = baton("generate", "--target", target, "--json", "--max-tokens", "5", "--ignore-eos", "hello")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 5
    serve.wait_for_text("worker w0 (prefill) died")
    (renewed, _) = until_ready(serve, target)
    assert renewed["pid"] != pids["w0"]
    done = baton("generate", "--target", target, "--mode", "disaggregated", "--max-tokens", "3", "hello")
    assert done.returncode == 0, done.stderr
    addresses = listening_addresses(serve.descendants())
    shared_memory |= shared_memory_of(serve.descendants())
    assert shared_memory, "Ray's object store is in shared memory"
    serve.interrupt()
    assert serve.wait_gone() == 0
    for host, port in addresses:
        with socket.socket() as probe:
            assert probe.connect_ex((host, port)) != 0, f"{host}:{port} still answers"
    deadline = time.monotonic() + TRANSIENT_S
    while left := [path for path in shared_memory if path.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert list(serve.temporary.iterdir()) == []


def until_ready(serve: ServeProcess, target: str) -> list[dict[str, Any]]:
    """The workers, once both serve."""
    deadline = time.monotonic() + HEALING_TIMEOUT_S
    while time.monotonic() < deadline:
        assert serve.process.poll() is None
        workers = workers_of(target)
        if [worker["state"] for worker in workers] == ["ready", "ready"]:
            return workers
        time.sleep(0.1)
    raise AssertionError(f"the fleet did not heal: {workers}")


def test_ctrl_c_while_starting_waits_for_nothing_that_still_loads(model: str, tmp_path: Path) -> None:
    """On a busy machine, a worker's process, and the one that reads a tokenizer, take half a minute to load.
    Here they take for ever."""
    (tmp_path / "transformers.py").write_text(
        "import sys, time\nprint('transformers loads', file=sys.stderr, flush=True)\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif any('default_worker.py' in word for word in sys.orig_argv):\n    time.sleep(600)\n"
    )
    with serving("--model", model, *SMALL, environment={"PYTHONPATH": str(tmp_path)}) as serve:
        serve.wait_for_text("transformers loads")
        serve.interrupt()
        assert serve.wait_gone() in (0, 130, -signal.SIGINT)
        assert "ready" not in serve.stderr
