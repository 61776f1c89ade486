"""Room on Ray: a cluster that holds the fleet, and one that does not, joined from outside."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests.factories.models import make_model_dir
from tests.factories.serving import baton, serving

pytestmark = pytest.mark.slow

# Loopback only, and a secret that both sides know.
RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-the-tests",
}

# A Ray of somebody else's, which lives until its stdin closes.
FOREIGN_RAY = """
import sys, ray
ray.init(address="local", num_cpus=int(sys.argv[1]), num_gpus=0, include_dashboard=False, log_to_driver=False,
         logging_level="ERROR", object_store_memory=100 * 2**20, _temp_dir=sys.argv[2])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@contextmanager
def foreign_ray(num_cpus: int, folder: Path) -> Iterator[str]:
    """The address of a Ray cluster that `baton serve` did not start."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN_RAY, str(num_cpus), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **RAY_ENVIRONMENT},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "Ray did not start"
        yield address  # leaving the block closes stdin


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Ray's sockets do not fit below pytest's own temporary folders."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model_dir(tmp_path / "tiny")
    path = tmp_path / "baton.yaml"
    sections = {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "float32"},
        "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
        "cluster": {"start_timeout_s": 180.0},
    }
    path.write_text(json.dumps(sections))
    return path


def test_joins_a_cluster_and_leaves_it_as_it_was(config: Path, short_tmp: Path) -> None:
    with foreign_ray(2, short_tmp) as address:
        for _ in range(2):  # the second time shows that the first one gave its room back
            with serving(str(config), "--ray-address", address, environment=RAY_ENVIRONMENT) as serve:
                target = serve.wait_ready()["target"]
                done = baton(
                    "generate", "--target", target, "--json", "--max-tokens", "4", "--ignore-eos", "hello"
                )
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["placement"]["mode"] == "disaggregated"
                serve.interrupt()
                assert serve.wait_gone() == 0


def test_a_fleet_that_lost_its_command_is_taken_over_or_ends(config: Path, short_tmp: Path) -> None:
    config.write_text(config.read_text().replace("180.0", '180.0, "orphan_timeout_s": 45.0, "name": "blue"'))
    with foreign_ray(2, short_tmp) as address:
        arguments = (str(config), "--ray-address", address)
        with serving(*arguments, environment=RAY_ENVIRONMENT) as serve:
            pids = {worker["pid"] for worker in serve.wait_ready()["workers"]}
            with serving(*arguments, environment=RAY_ENVIRONMENT) as second:
                assert second.wait_gone() == 1
                assert "a fleet named 'blue' is in use by another `baton serve`" in second.stderr
            serve.process.kill()
            assert serve.wait_gone() == -signal.SIGKILL
        with serving(*arguments, "--dtype", "bfloat16", environment=RAY_ENVIRONMENT) as other:
            assert other.wait_gone() == 1
            assert "model.dtype is 'float32' there, 'bfloat16' here" in other.stderr
        with serving(*arguments, environment=RAY_ENVIRONMENT) as heir:
            ready = heir.wait_ready()
            assert {worker["pid"] for worker in ready["workers"]} == pids
            done = baton("generate", "--target", ready["target"], "--max-tokens", "4", "hello")
            assert done.returncode == 0, done.stderr
            heir.process.kill()
            assert heir.wait_gone() == -signal.SIGKILL
        assert all(psutil.pid_exists(pid) for pid in pids)
        psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=120)
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_command_that_comes_back_after_its_fleet_has_ended_says_so(config: Path, short_tmp: Path) -> None:
    """As on a laptop that was closed: its fleet, left alone, had ended, and the door led nowhere."""
    config.write_text(config.read_text().replace("180.0", '180.0, "orphan_timeout_s": 3.0'))
    with (
        foreign_ray(2, short_tmp) as address,
        serving(str(config), "--ray-address", address, environment=RAY_ENVIRONMENT) as serve,
    ):
        workers = [psutil.Process(worker["pid"]) for worker in serve.wait_ready()["workers"]]
        serve.process.send_signal(signal.SIGSTOP)
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
        serve.process.send_signal(signal.SIGCONT)
        assert serve.wait_gone() == 1
        assert "baton serve: the fleet has ended" in serve.stderr


def test_a_cluster_without_room_is_an_error_with_numbers(config: Path, short_tmp: Path) -> None:
    text = config.read_text().replace("180.0", "2.0")
    config.write_text(text)
    with (
        foreign_ray(1, short_tmp) as address,
        serving(str(config), "--ray-address", address, environment=RAY_ENVIRONMENT) as serve,
    ):
        assert serve.wait_gone() == 1
        assert "no room for 2 workers of 1 CPU each: 1 nodes, free 1 CPU, 0 GPU" in serve.stderr
        assert "cluster.decode" in serve.stderr


def test_a_private_ray_with_too_few_gpus_says_so_at_once(config: Path) -> None:
    with serving(str(config), "--device", "cuda", "--prefill", "64") as serve:
        assert serve.wait_gone() == 1
        there_are_some = "no room for 65 workers of 1 CPU, 1 GPU each"
        there_is_none = "engine.device: got 'cuda', but Ray finds no GPU on any node"
        assert (there_are_some if torch.cuda.is_available() else there_is_none) in serve.stderr


def test_an_address_where_no_ray_is(config: Path) -> None:
    with serving(str(config), "--ray-address", "127.0.0.1:9") as serve:
        assert serve.wait_gone() == 1
        assert "no Ray cluster answers at 127.0.0.1:9 (cluster.ray_address)" in serve.stderr
