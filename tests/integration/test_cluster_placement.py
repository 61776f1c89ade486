"""Room on Ray: a cluster that holds the fleet, and one that does not, joined from outside."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.factories.foreign_ray import RAY_ENVIRONMENT
from tests.factories.models import make_model_dir
from tests.factories.serving import STOP_TIMEOUT_S, baton, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model_dir(tmp_path / "tiny")
    path = tmp_path / "baton.yaml"
    sections = {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "float32"},
        "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
        "cluster": {"start_timeout_s": 600.0},
    }
    path.write_text(json.dumps(sections))
    return path


def test_a_fleet_is_taken_over_and_what_died_while_the_controller_hung_leaves_nothing(
    config: Path, address_of_ray: str
) -> None:
    """No process and no reserved room is left, as the last test with this cluster shows."""
    more = '"orphan_timeout_s": 300.0, "unresponsive_timeout_s": 20.0, "name": "blue"'
    config.write_text(config.read_text().replace("600.0", f"600.0, {more}"))
    arguments = (str(config), "--ray-address", address_of_ray)
    with serving(*arguments, environment=RAY_ENVIRONMENT) as serve:
        pids = {worker["pid"] for worker in serve.wait_ready()["workers"]}
        workers = [psutil.Process(pid) for pid in pids]
        with serving(*arguments, environment=RAY_ENVIRONMENT) as second:
            assert second.wait_gone() == 1
            assert "a fleet named 'blue' is in use by another command" in second.stderr
            assert f"(process {serve.process.pid} on " in second.stderr
        with serving(*arguments, "--dtype", "bfloat16", environment=RAY_ENVIRONMENT) as other:
            assert other.wait_gone() == 1
            assert (
                "model.dtype is 'float32' in the running fleet, 'bfloat16' in this configuration"
                in other.stderr
            )
        serve.process.kill()
        assert serve.wait_gone() == -signal.SIGKILL
    with serving(*arguments, "--dtype", "auto", environment=RAY_ENVIRONMENT) as heir:
        ready = heir.wait_ready()
        status = baton("status", "--target", ready["target"], "--json")
        assert json.loads(status.stdout)["dtype"] == "float32"  # as when the fleet began
        assert {worker["pid"] for worker in ready["workers"]} == pids
        assert "took over the running fleet 'blue'" in heir.stderr
        asked = ("generate", "--target", ready["target"], "--json", "--max-tokens", "4", "--ignore-eos")
        done = baton(*asked, "hello")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["placement"]["mode"] == "disaggregated"
        assert all(worker.is_running() for worker in workers)
        raylet = workers[0].parent()
        assert raylet is not None
        (controller,) = [p for p in raylet.children() if "ControllerActor" in " ".join(p.cmdline())]
        controller.suspend()
        workers[0].kill()
        heir.interrupt()
        assert heir.wait_gone() == 0
    _, alive = psutil.wait_procs([*workers, controller], timeout=STOP_TIMEOUT_S)
    assert alive == []


def test_a_command_that_comes_back_after_its_fleet_has_ended_says_so(
    config: Path, address_of_ray: str
) -> None:
    """For example, a laptop was closed: the fleet lost its owner and ended, so its control server is gone."""
    config.write_text(config.read_text().replace("600.0", '600.0, "orphan_timeout_s": 15.0'))
    with serving(str(config), "--ray-address", address_of_ray, environment=RAY_ENVIRONMENT) as serve:
        workers = [psutil.Process(worker["pid"]) for worker in serve.wait_ready()["workers"]]
        serve.process.send_signal(signal.SIGSTOP)
        _, alive = psutil.wait_procs(workers, timeout=120)
        assert alive == []
        serve.process.send_signal(signal.SIGCONT)
        assert serve.wait_gone() == 1
        assert "baton serve: the fleet has ended" in serve.stderr


def test_a_cluster_without_room_is_an_error_with_numbers(config: Path, address_of_ray: str) -> None:
    """The numbers also show that the fleets of the tests before have given back everything they used."""
    config.write_text(config.read_text().replace("600.0", "2.0"))
    arguments = (str(config), "--ray-address", address_of_ray, "--prefill", "2")
    with serving(*arguments, environment=RAY_ENVIRONMENT) as serve:
        assert serve.wait_gone() == 1
        assert "no room for 3 workers of 1 CPU each: 1 nodes have 2 CPU, 0 GPU free" in serve.stderr
        assert "cluster.decode" in serve.stderr


def test_an_address_where_no_ray_is(config: Path) -> None:
    with serving(str(config), "--ray-address", "127.0.0.1:9") as serve:
        assert serve.wait_gone() == 1
        assert "no Ray cluster answers at 127.0.0.1:9 (cluster.ray_address)" in serve.stderr
