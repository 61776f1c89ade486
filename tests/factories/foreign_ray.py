"""A Ray cluster that Baton did not start, for commands that join one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

# Ray listens on loopback only. Both sides know its token.
RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-the-tests",
}

# Runs a Ray cluster until its stdin closes.
FOREIGN_RAY = """
import sys, ray
for may_fail in (True, True, False):  # half a minute is all that Ray gives itself to start
    try:
        ray.init(address="local", num_cpus=int(sys.argv[1]), num_gpus=int(sys.argv[3]), include_dashboard=False,
                 log_to_driver=False, logging_level="ERROR", object_store_memory=100 * 2**20, _temp_dir=sys.argv[2],
                 _system_config={"prestart_worker_first_driver": False})
        break
    except Exception:
        ray.shutdown()
        if not may_fail:
            raise
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@contextmanager
def foreign_ray(
    num_cpus: int, folder: Path, num_gpus: int = 0, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """The address of a Ray cluster that `baton serve` did not start. Its processes inherit `environment`."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN_RAY, str(num_cpus), str(folder), str(num_gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **RAY_ENVIRONMENT, **environment},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "Ray did not start"
        yield address  # leaving the block closes stdin
