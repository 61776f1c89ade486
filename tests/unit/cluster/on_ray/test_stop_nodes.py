"""stop_nodes.sh, with an `ssh` and a `ray` that only write down what they were asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STOP_NODES = Path(__file__).resolve().parents[4] / "cluster/ray_up/stop_nodes.sh"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The home folder of a head, as `ray up` leaves it."""
    programs = tmp_path / "baton-venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    for name, code in {
        "ray": 'echo "head: $*" >> "$HOME/log"',
        # The next to last argument says where.
        "ssh": 'eval "host=\\${$(($# - 1))}"; echo "$host: ${*: -1}" >> "$HOME/log"; [ "$host" != baton@10.0.0.66 ]',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def stop(head: Path, *hosts: str) -> subprocess.CompletedProcess[str]:
    config = {"auth": {"ssh_user": "baton"}, "provider": {"type": "local", "worker_ips": hosts}}
    (head / "ray_bootstrap_config.yaml").write_text(json.dumps(config))
    environment = {"HOME": str(head), "PATH": f"{head}/baton-venv/bin:/usr/bin:/bin"}
    return subprocess.run([str(STOP_NODES)], capture_output=True, text=True, timeout=20, env=environment)


def test_ray_ends_on_the_head_and_then_on_every_other_host(head: Path) -> None:
    """If another host were stopped before the head, the head's autoscaler would start its Ray again."""
    assert stop(head, "10.0.0.11", "10.0.0.12").returncode == 0
    first, *others = (head / "log").read_text().splitlines()
    assert first == "head: stop"
    assert sorted(others) == [f"baton@10.0.0.{n}: ~/baton-venv/bin/ray stop" for n in (11, 12)]


def test_an_unreachable_host_is_named_and_delays_no_other(head: Path) -> None:
    done = stop(head, "10.0.0.66", "10.0.0.12")
    assert done.returncode == 1
    assert "may still run on 10.0.0.66;" in done.stderr
    assert "baton@10.0.0.12" in (head / "log").read_text()
