"""The servers that `benchmarks.interference` compares. Each is a process with an OpenAI-compatible API."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton.config import BatonConfig, merge
from baton.system.cpus import find_machine
from baton.system.parent import end_with_parent
from benchmarks.peer import QUIET, ROOT

START_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 30.0
MODEL_NAME = "benchmark"

BATON_SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "Baton, 1 P + 1 D": {
        "cluster": {"prefill": 1, "decode": 1},
        "gateway": {"routing_mode": "disaggregated"},
    },
    "Baton, 1 P + 1 D, auto": {"cluster": {"prefill": 1, "decode": 1}, "gateway": {"routing_mode": "auto"}},
    "Baton, 1 P + 1 D, own cores": {"cluster": {"prefill": 1, "decode": 1, "lend_cores": False}},
    "Baton, 1 colocated": {"cluster": {"prefill": 0, "decode": 1}},
    "Baton, 2 colocated": {"cluster": {"prefill": 0, "decode": 2}},
}
VLLM = "vLLM, colocated"


@dataclass(frozen=True, slots=True)
class Server:
    """A side whose server is ready."""

    name: str
    port: int
    model: str
    """The name of the model in requests."""


@contextmanager
def baton_server(name: str, model: Path, overrides: Mapping[str, Mapping[str, Any]]) -> Iterator[Server]:
    """Runs `baton serve` without Ray, with its defaults except for `overrides`, section by section."""
    fixed = {
        "model": {"path": str(model)},
        "cluster": {"ray_address": "none"},
        "gateway": {"http_port": 0, "grpc_port": 0},
        "logging": {"level": "warning"},
    }
    values = merge(merge(fixed, BATON_SIDES[name]), {key: dict(each) for key, each in overrides.items()})
    BatonConfig.from_mapping(values)  # reports a wrong override here, where the error is visible
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baton.json"
        path.write_text(json.dumps(values))  # JSON is YAML
        with _process([sys.executable, "-m", "cli.main", "serve", str(path), "--json"], {}) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"{name} ended with {process.wait()} before it was ready; see standard error"
                )
            port = int(json.loads(line)["http"].rpartition(":")[2])
            model_name = _served_model(port)
            assert model_name is not None, "it said that it is ready"
            yield Server(name, port, model_name)


@contextmanager
def vllm_server(python: str, model: Path, dtype: str, max_num_batched_tokens: int | None) -> Iterator[Server]:
    """Runs vLLM's own server with its defaults, except for a smaller KV cache, a lower limit of the context's length,
    and `max_num_batched_tokens` if given. As by default, it has a thread for each core of this machine.
    """
    port = _free_port()
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += [
        "--served-model-name",
        MODEL_NAME,
        "--dtype",
        dtype,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--max-model-len", "4096"]
    if max_num_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    cores = ",".join(str(core.cpus[0]) for core in find_machine().cores)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with _process(command, environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (model_name := _served_model(port)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(command)} does not serve; see standard error")
            time.sleep(0.5)
        yield Server(VLLM, port, model_name)


def _served_model(port: int) -> str | None:
    """The name of the model that the server offers; None if no server answers yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10.0) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


@contextmanager
def _process(
    command: list[str], environment: Mapping[str, str], stdout: int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Runs a process. The process, and everything that it started, end with the block. If this process is killed, the
    process gets SIGTERM, after which both kinds of servers end what they started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **QUIET, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        text=True,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
