"""One worker as a process: builds the role on its engine; knows neither Ray nor who started it.

Ray actors use `build_worker`. Without Ray, for tests, benchmarks and machines of one's own:

    python -m cluster.worker_process --role prefill --name w0 --config FILE

prints the worker's endpoint as one line of JSON once it serves, and stops cleanly on SIGTERM, SIGINT or when its
stdin closes, so that it never outlives whoever holds the other end. It takes the cluster's secret from
BATON_CLUSTER_SECRET, or from the file of `network.secret_file`, which must be there.
"""

import argparse
import json
import logging
import os
import selectors
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from baton.config import BatonConfig
from baton.curve import ClusterKeys, derive_keys
from baton.errors import BatonError
from baton.kv import WorkerRef
from baton.wakeup import WakeUp
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.secret import load_secret
from decode_worker import DecodeWorker
from engine.host import EngineHost
from engine.loading.pretrained import default_cache_dir, resolve
from engine.role import Role
from prefill_worker import PrefillWorker


def build_worker(
    config: BatonConfig, keys: ClusterKeys, model_path: Path, role: WorkerRole, name: str
) -> EngineHost:
    """A worker that is not started yet. It queues as many requests as one gateway lets in."""
    max_waiting = config.gateway.max_in_flight
    roles: dict[WorkerRole, Role] = {
        WorkerRole.PREFILL: PrefillWorker(max_waiting),
        WorkerRole.DECODE: DecodeWorker(max_waiting),
    }
    own = roles.pop(role)
    return EngineHost(config, keys, model_path, own, name, tuple(roles.values()))


def endpoint_to_json(endpoint: WorkerEndpoint) -> str:
    return json.dumps({**asdict(endpoint), "role": endpoint.role.value})


def endpoint_from_json(line: str) -> WorkerEndpoint:
    """The inverse of `endpoint_to_json`, for whoever started the process."""
    values = json.loads(line)
    ref = values["ref"]
    ref["kv_addresses"] = tuple(ref["kv_addresses"])
    return WorkerEndpoint(**{**values, "ref": WorkerRef(**ref), "role": WorkerRole(values["role"])})


def main(arguments: list[str] | None = None) -> int:
    """Serves until told to stop. Exit codes: 0 stopped cleanly, 1 could not start."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.worker_process", description="One worker without Ray."
    )
    parser.add_argument("--role", required=True, choices=[role.value for role in WorkerRole])
    parser.add_argument("--name", required=True)
    parser.add_argument("--config", type=Path, help="YAML file, as for `baton serve`")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(message)s")
    try:
        config = BatonConfig.from_yaml(options.config) if options.config else BatonConfig()
        keys = derive_keys(load_secret(config.network, os.environ, may_create=False))
        model_path = resolve(config.model.path, default_cache_dir(os.environ))
        worker = build_worker(config, keys, model_path, WorkerRole(options.role), options.name)
        endpoint = worker.start()
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        end = _end_on_signals()  # before anybody can know whom to signal
        print(endpoint_to_json(endpoint), flush=True)
        _wait_for(end)
    finally:
        worker.stop()
    return 0


def _end_on_signals() -> WakeUp:
    end = WakeUp()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: end.set())
    return end


def _wait_for(end: WakeUp) -> None:
    """Returns when told to end, or when stdin does."""
    with selectors.PollSelector() as selector:  # epoll would refuse stdin from /dev/null
        selector.register(end.fileno(), selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if end.fileno() in ready or not os.read(sys.stdin.fileno(), 4096):
                return


if __name__ == "__main__":
    sys.exit(main())
