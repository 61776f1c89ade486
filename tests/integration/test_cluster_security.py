"""The secret's way through real processes: it reaches every worker, and no other user can read it on the way."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from baton.config import BatonConfig
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER, Heartbeat, Hello
from baton.system.curve import ClusterSecret, derive_keys, secure_client
from baton.system.secret import SECRET_VARIABLE
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.processes.worker_process import WorkerProcess
from tests.factories.fork_server import ForkServer, forks_workers
from tests.factories.models import make_model_dir
from tests.factories.serving import baton, serving

pytestmark = pytest.mark.slow

SMALL = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-mib", "16", "--num-threads", "1")
PATIENCE_S = 60.0


def answers(endpoint: WorkerEndpoint, secret: ClusterSecret | None, within_s: float = 2.0) -> bool:
    """Whether the worker talks to a gateway with this secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as gateway:
        gateway.setsockopt(zmq.LINGER, 0)
        secure_client(gateway, derive_keys(secret).request)
        gateway.connect(endpoint.request_address)
        gateway.send(TO_WORKER.encode(Hello(endpoint.ref.incarnation, "g", 1, None, 0)))
        if not gateway.poll(int(within_s * 1_000)):
            return False
        message = TO_GATEWAY.decode(gateway.recv())
        return isinstance(message, Heartbeat) and message.status.ref == endpoint.ref


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "tiny")


@pytest.fixture
def forked_worker(fork_server: ForkServer) -> Iterator[None]:
    """For tests in which it does not matter how the worker's process has started."""
    with forks_workers(fork_server):
        yield


def config_of(**network: str) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32", "load_format": "dummy"},
            "engine": {"kv_cache_memory_mib": 8, "num_threads": 1},
            "network": network,
        }
    )


def test_a_child_gets_the_secret_but_not_as_an_argument(model: Path) -> None:
    secret = ClusterSecret("a secret that only this child gets")
    worker = WorkerProcess(config_of(), model, secret, WorkerRole.DECODE, "w0")
    try:
        endpoint = worker.wait_until_ready()
        arguments = Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        assert arguments.split(b"\0")[1:4] == [b"-P", b"-m", b"worker"]
        assert secret.text.encode() not in arguments
        assert answers(endpoint, secret, PATIENCE_S)
        assert not answers(endpoint, None)
        assert not answers(endpoint, ClusterSecret("a secret that it does not know"))
    finally:
        assert worker.stop() == 0


@pytest.mark.usefixtures("forked_worker")
def test_a_child_without_security_talks_in_the_clear(model: Path) -> None:
    worker = WorkerProcess(config_of(security="none"), model, None, WorkerRole.DECODE, "w0")
    try:
        assert answers(worker.wait_until_ready(), None, PATIENCE_S)
    finally:
        assert worker.stop() == 0


@pytest.mark.usefixtures("forked_worker")
def test_a_worker_by_itself_does_not_invent_a_secret(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    path = model.parent / "baton.json"
    secret_file = str(model.parent / "cluster.secret")
    path.write_text(json.dumps({"model": {"path": str(model)}, "network": {"secret_file": secret_file}}))
    command = [sys.executable, "-m", "worker", "--role", "decode", "--name", "w0"]
    done = subprocess.run(
        [*command, "--config", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["kind"] == "ConfigError"
    assert f"{model.parent}/cluster.secret does not exist; copy it" in done.stderr
    assert not (model.parent / "cluster.secret").exists()


def test_serve_refuses_a_secret_that_others_can_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    path = model.parent / "cluster.secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    done = baton("serve", "--model", str(model), "--secret-file", str(path))
    assert done.returncode == 2
    assert f"{path} has mode 0644" in done.stderr
    assert "0123456789abcdef" not in done.stderr


def test_the_first_serve_makes_the_secret_nobody_can_read_it_elsewhere_and_kill_9_ends_everything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with serving("--model", str(model), *SMALL) as serve:
        ready = serve.wait_ready()
        file = tmp_path / "config" / "baton" / "cluster.secret"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        knock_until_counted(ready["target"], ready["workers"][0])
        done = baton("generate", "--target", ready["target"], "--json", "--max-tokens", "3", "hello")
        assert json.loads(done.stdout)["placement"]["mode"] == "disaggregated"

        hidden = hidden_texts(file.read_text().strip())
        processes = [serve.process.pid, *[process.pid for process in serve.descendants()]]
        assert [pid for pid in processes if has_any(psutil.Process(pid).cmdline(), hidden)] == []
        written = [path for path in serve.temporary.rglob("*") if path.is_file()]
        assert any(path.suffix == ".log" for path in written)
        assert [path for path in written if has_any([path.read_bytes().decode("latin-1")], hidden)] == []
        assert len(serve.descendants()) > 4
        serve.process.kill()
        assert serve.wait_gone() == -signal.SIGKILL, "and all its descendants have ended"
        assert not has_any([serve.stderr], hidden)


def knock_until_counted(target: str, worker: dict[str, str]) -> None:
    """Connects without the secret, until `baton status --json` shows that the stranger was denied."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(worker["request_address"])
        end = time.monotonic() + 20
        while True:
            status = json.loads(baton("status", "--target", target, "--json").stdout)
            counters = {w["name"]: w["counters"]["request_denied_peers"] for w in status["workers"]}
            if counters.pop(worker["name"]):
                break
            assert time.monotonic() < end
    assert set(counters.values()) == {0}


def hidden_texts(secret: str) -> list[str]:
    keys = derive_keys(ClusterSecret(secret))
    assert keys.request is not None
    assert keys.kv is not None
    hidden = [
        keys.request.server_secret,
        keys.request.client_secret,
        keys.kv.server_secret,
        keys.kv.client_secret,
    ]
    return [secret, *[key.decode() for key in hidden]]


def has_any(texts: list[str], hidden: list[str]) -> bool:
    return any(secret in text for text in texts for secret in hidden)


def test_the_environment_of_these_tests_has_a_secret() -> None:
    """Otherwise, a cluster of a test would make a secret in the home of the user who runs the test."""
    assert len(os.environ[SECRET_VARIABLE]) >= 16
