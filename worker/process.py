"""One worker as a process; knows neither Ray nor its parent.

Ray actors use `build_worker`. Without Ray (`baton serve` with `cluster.ray_address: none`, tests, benchmarks):

    python -m worker --role prefill --name w0 --config FILE

This prints the worker's endpoint as one line of JSON once the worker serves, or prints why it could not start. The
worker stops cleanly on SIGTERM, on SIGINT, or when its stdin closes, so it never outlives the process at the other end
of stdin. If stdin closes while the worker starts, the worker and its compilers are killed. Once it serves, it takes
control calls from stdin, and prints the replies (worker/control_channel.py). If the engine ends by itself, the process
ends with exit code 1. The cluster's secret comes from BATON_CLUSTER_SECRET, or from the file of `network.secret_file`,
which must exist.
"""

import argparse
import logging
import os
import selectors
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, ConfigError
from baton.system.cpus import CpuShare, cpus_in_text, find_machine, pin
from baton.system.curve import ClusterKeys, derive_keys
from baton.system.garbage import settle
from baton.system.logs import write_logs
from baton.system.no_room import in_words
from baton.system.open_files import raise_open_files
from baton.system.paced import paced
from baton.system.secret import load_secret
from baton.system.wakeup import WakeUp
from baton.worker import WorkerRole
from engine.lent_cpus import MOST_CPUS, LentCpus
from engine.loading.dtype import with_chosen_dtype
from engine.loading.pretrained import default_cache_dir, resolve
from engine.native.library import native_library
from worker.control_calls import WorkerControl
from worker.control_channel import StdioControlServer
from worker.host import EngineHost
from worker.ready_line import endpoint_to_json, failure_to_json

logger = logging.getLogger(__name__)

NUM_FILES = 4096
"""The limit of open files that a worker requests if the system does not let it use its whole hard limit."""


def build_worker(
    config: BatonConfig,
    keys: ClusterKeys,
    model_path: Path,
    role: WorkerRole,
    name: str,
    share: CpuShare | None = None,
) -> EngineHost:
    """A worker that is not started yet. With a `share`, this process runs only on the CPUs of the share from now on."""
    if share is None:
        return EngineHost(config, keys, model_path, role, name)
    lent_cpus = _lend(config, role, share.cpus)
    pin(share.cpus)
    engine = config.engine.with_values("engine", num_threads=share.num_threads)
    config = config.model_copy(update={"engine": engine})
    return EngineHost(config, keys, model_path, role, name, share.cpus, lent_cpus)


def _lend(config: BatonConfig, role: WorkerRole, own: tuple[int, ...]) -> LentCpus | None:
    """What a worker on these CPUs lends and borrows; call it before the worker is pinned. None if it does neither."""
    if not own or max(own) >= MOST_CPUS or not config.cluster.lend_cores:
        return None
    if (library := native_library()) is None:
        return None
    others: list[int] = []
    if config.num_ranks(role) == 1:
        cores = [core.cpus for core in find_machine().cores]
        others = [cpus[0] for cpus in cores if set(own).isdisjoint(cpus)]
    try:
        return LentCpus(library, own, others, config.cluster.name)
    except OSError as error:
        logger.warning("this worker lends and borrows no cores: %s", error)
        return None


def main(arguments: list[str] | None = None, on_serving: Callable[[], None] = lambda: None) -> int:
    """Serves until told to stop. Exit codes: 0 stopped cleanly, 1 could not start, or its engine ended by itself.

    Calls `on_serving` when the worker has started. From then on it stops cleanly when its stdin closes.
    """
    options = _parser().parse_args(arguments)
    try:
        worker = _worker_of(options)
        endpoint = worker.start()
        settle()
        try:
            server = StdioControlServer(WorkerControl(worker).call, _print)
        except RuntimeError:  # no free thread
            worker.stop()
            raise
    except BatonError as error:
        sys.stderr.write(f"error: {error}\n")  # at once; print may write the end of the line later
        _print(failure_to_json(error))
        return 1
    except Exception as error:  # such as a system without a free thread: the parent tells the operator
        logger.exception("the worker cannot start")
        _print(failure_to_json(ClusterError(f"it cannot start: {in_words(error)}")))
        return 1
    try:
        stop = _wakeup_by_signals()  # before the pid is known to others
        worker.when_ended(stop.set)
        on_serving()
        _print(endpoint_to_json(endpoint))
        with closing(server):
            _serve_control(server, stop)
    finally:
        failure = worker.status().failure
        worker.stop()
    return 1 if failure else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description="One worker without Ray.")
    parser.add_argument("--role", required=True, choices=[role.value for role in WorkerRole])
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="overrides the configuration's logging.level",
    )
    parser.add_argument("--config", type=Path, help="YAML file, like that of `baton serve`")
    parser.add_argument(
        "--threads", type=int, help="compute threads of each rank; default: the configuration's"
    )
    parser.add_argument("--cpus", type=cpus_in_text, default=(), help="CPUs to run on, e.g. 0-3,8")
    return parser


def _worker_of(options: argparse.Namespace) -> EngineHost:
    """The worker that the options ask for, not started yet. Sets up the log and the limits of this process."""
    level = options.log_level  # a worker logs no prompts at any level
    overrides = {"logging": {"level": level.lower(), "log_prompts": False}} if level else {}
    if options.config is None:
        config = BatonConfig.from_mapping(overrides)
    else:
        config = BatonConfig.from_yaml(options.config, overrides)
    write_logs(config.logging, component="worker", fleet=config.cluster.name, worker=options.name)
    raise_open_files(NUM_FILES)
    keys = derive_keys(load_secret(config.network, os.environ, may_create=False))
    model_path = resolve(
        config.model.path,
        default_cache_dir(os.environ),
        paced(logger.info),
        weights=config.model.load_format == "auto",
    )
    config = with_chosen_dtype(config, model_path)
    role = WorkerRole(options.role)
    num_threads = options.threads or config.num_threads(role)
    if options.cpus and num_threads is None:
        raise ConfigError("--cpus needs --threads, or a configuration that says how many")
    share = None if num_threads is None else CpuShare(num_threads, options.cpus)
    return build_worker(config, keys, model_path, role, options.name, share)


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # no reader, so stdin will end soon, too
        return


def _wakeup_by_signals() -> WakeUp:
    """A flag that SIGTERM and SIGINT set."""
    stop = WakeUp()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    stop.set_by_signals()
    return stop


def _serve_control(server: StdioControlServer, stop: WakeUp) -> None:
    """Serves control calls until the process is told to end, or until stdin ends."""
    with selectors.PollSelector() as selector:  # epoll would refuse stdin from /dev/null
        selector.register(stop.fileno(), selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if stop.fileno() in ready:
                return
            data = os.read(sys.stdin.fileno(), 65_536)
            if not data:
                return
            server.receive(data)
