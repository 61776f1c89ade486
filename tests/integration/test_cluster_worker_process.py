"""One worker without Ray: it says where it is, and ends when told or when nobody holds it any more."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.worker import WorkerRole
from cluster.worker_process import endpoint_from_json
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

Process = subprocess.Popen[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model_dir(tmp_path / "tiny")
    path = tmp_path / "baton.yaml"
    path.write_text(
        f"model: {{path: {model}, dtype: float32}}\nengine: {{kv_cache_memory_mib: 8, num_threads: 1}}\n"
    )
    return path


def start(*arguments: str) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.worker_process", "--name", "w0", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "end",
    [
        lambda process: process.send_signal(signal.SIGTERM),
        lambda process: process.send_signal(signal.SIGINT),
        lambda process: process.stdin.close(),
    ],
    ids=["SIGTERM", "SIGINT", "stdin closes"],
)
def test_prints_its_endpoint_and_ends_cleanly(config: Path, end: Callable[[Process], None]) -> None:
    with start("--role", "prefill", "--config", str(config)) as process:
        assert process.stdout is not None
        endpoint = endpoint_from_json(process.stdout.readline())
        assert endpoint.ref.name == "w0"
        assert endpoint.role is WorkerRole.PREFILL
        assert endpoint.pid == process.pid
        assert endpoint.request_address.startswith("tcp://127.0.0.1:")
        end(process)
        assert process.wait(30) == 0


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'nothing'}}}\n")
    with start("--role", "decode", "--config", str(config)) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "neither a folder nor a known name" in err
