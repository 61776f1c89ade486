"""EngineHost: what cannot work is refused at the start, with the key that is wrong."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import ClusterError, ConfigError
from baton.kv import TransferRole
from baton.system.curve import derive_keys
from baton.worker import KVPeerCounts, WorkerRole
from engine.executor import Executor
from tests.factories.security import KEYS
from worker.host import EngineHost
from worker.request_plane import RequestServer
from worker.step_trace import TraceEnd, read_trace


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"engine": {"device": "cuda"}}, "engine.device: got 'cuda'"),
        (
            {"scheduler": {"max_model_len": 9_999}},
            "scheduler.max_model_len: got 9999, but this model supports at most 1024",
        ),
        (
            {"scheduler": {"block_size": 1024}, "engine": {"kv_cache_memory_mib": 1}},
            "too little for two blocks",
        ),
        (
            {"scheduler": {"preemption": "swap", "block_size": 8192}, "engine": {"swap_space_mib": 1}},
            "engine.swap_space_mib: got 1, which is too little for one block",
        ),
        (
            {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}},
            r"scheduler: max_num_batched_tokens \(512\) must be at least max_model_len \(1024\)",
        ),
        ({"engine": {"trace_dir": "/dev/null/traces"}}, "engine.trace_dir: got '/dev/null/traces'"),
        (
            {"engine": {"kv_cache_memory_mib": 2**30}},
            "the KV pool needs 1,073,741,8.. MiB, and .* MiB are free",
        ),
        (
            {
                "scheduler": {"preemption": "swap"},
                "engine": {"kv_cache_memory_mib": 1, "swap_space_mib": 2**30},
            },
            "the KV pool needs 1,073,741,8.. MiB, and .* MiB are free",
        ),
    ],
)
def test_a_configuration_that_this_model_or_machine_cannot_serve(
    folder: Path, values: dict[str, dict[str, object]], complaint: str
) -> None:
    config = BatonConfig.from_mapping({"model": {"load_format": "dummy", "dtype": "float32"}} | values)
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    with pytest.raises(ConfigError, match=complaint):
        host.start()


def test_a_pool_that_a_limit_of_the_process_forbids_is_a_config_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
    config = BatonConfig.from_mapping({"model": {"load_format": "dummy", "dtype": "float32"}})
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    with pytest.raises(
        ConfigError, match=r"the KV pool needs .* MiB, but the system refuses them \(Cannot allocate memory;"
    ):
        host.start()


def test_a_host_starts_reports_and_stops_cleanly(folder: Path) -> None:
    config = BatonConfig.from_mapping(
        {"model": {"dtype": "float32"}, "engine": {"num_threads": 1}, "scheduler": {"num_blocks": 20}}
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    endpoint = host.start()
    assert host._parts.core.progress._num_recent == 0, (
        "the check before it serves is not the engine's first step"
    )
    status = host.status()
    assert status.ref == endpoint.ref
    assert (status.state.value, status.kv_blocks.total, status.kv_blocks.free) == ("ready", 19, 19)
    assert host.drain(5.0)
    assert host.status().state.value == "draining"
    host.stop()
    assert host.status().state.value == "stopped"


def test_a_host_reports_the_sizes_of_its_steps_as_completed(folder: Path) -> None:
    """A budget that is unset has room for a step of decodes; on a GPU, other defaults apply, too."""
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32", "load_format": "dummy"},
            "scheduler": {"num_blocks": 20, "max_num_seqs": 200},
        }
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    host.start()
    status = host.status()
    host.stop()
    assert (status.max_num_seqs, status.max_num_batched_tokens) == (200, 200)


def test_a_host_counts_strangers_on_both_planes_even_while_it_is_idle(folder: Path) -> None:
    config = BatonConfig.from_mapping(
        {"model": {"dtype": "float32", "load_format": "dummy"}, "scheduler": {"num_blocks": 20}}
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    endpoint = host.start()
    names = ("kv_denied_peers", "request_denied_peers")
    assert [host.status().counters[name] for name in names] == [0, 0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(endpoint.request_address)
        stranger.connect(endpoint.ref.kv_addresses[0])
        end = time.monotonic() + 60
        while not all(host.status().counters[name] for name in names):
            assert time.monotonic() < end
    host.stop()


def test_a_host_says_what_its_ranks_have_handed_over_even_while_it_is_idle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks report after the engine's last step."""
    config = BatonConfig.from_mapping(
        {"model": {"dtype": "float32", "load_format": "dummy"}, "scheduler": {"num_blocks": 20}}
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    host.start()
    assert host.status().kv_peers == ()
    counts = KVPeerCounts(TransferRole.CONSUMER, "p0", "zmq_tcp", 1, 0, 0, 10, 0.0, 0.0, 0.0)
    monkeypatch.setattr(host._parts.executor.connector, "peers", lambda: (counts,))
    assert host.status().kv_peers == (counts,)
    host.stop()


@pytest.mark.parametrize("owner", [Executor, RequestServer])
def test_a_host_that_fails_while_it_begins_leaves_no_port_open_and_no_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """It fails before its loop was started, or after."""
    config = BatonConfig.from_mapping(
        {"model": {"dtype": "float32", "load_format": "dummy"}, "scheduler": {"num_blocks": 20}}
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")

    def fail(*_: object) -> None:
        raise ClusterError("rank 1 failed")

    monkeypatch.setattr(owner, "start", fail)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClusterError, match="rank 1 failed"):
        host.start()
    assert {thread.name for thread in threading.enumerate()} <= before
    address, port = host._parts.server.address.removeprefix("tcp://").rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, int(port)))


@pytest.mark.parametrize("security", ["curve", "none"])
def test_a_host_does_not_leave_a_plane_open_that_should_be_closed(tmp_path: Path, security: str) -> None:
    config = BatonConfig.from_mapping({"network": {"security": security}})
    keys = derive_keys(None) if security == "curve" else KEYS
    with pytest.raises(AssertionError):
        EngineHost(config, keys, tmp_path, WorkerRole.DECODE, "d0")


def test_a_host_writes_its_steps_into_the_trace_folder(folder: Path, tmp_path: Path) -> None:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32", "load_format": "dummy"},
            "engine": {"num_threads": 1, "trace_dir": str(tmp_path / "traces")},
            "scheduler": {"num_blocks": 20},
        }
    )
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    endpoint = host.start()
    host.stop()
    trace = read_trace(tmp_path / "traces" / f"d0-{endpoint.ref.incarnation}.jsonl")
    assert (trace.header.worker, trace.header.num_blocks, trace.end) == ("d0", 19, TraceEnd.CLOSED)


class JumpingClock(SystemClock):
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def test_time_in_which_a_worker_stood_still_is_not_the_time_of_a_step(folder: Path) -> None:
    config = BatonConfig.from_mapping({"model": {"dtype": "float32"}, "scheduler": {"num_blocks": 20}})
    host = EngineHost(config, KEYS, folder, WorkerRole.DECODE, "d0")
    host._clock = clock = JumpingClock()
    host.start()
    progress = host._parts.core.progress
    before_s, looked = progress.now(), threading.Event()
    clock.ahead_s = 1_000_000.0
    assert progress.now() - before_s < 500_000.0
    on_look = host._parts.watch._on_look

    def note_look() -> None:
        on_look()
        looked.set()

    host._parts.watch._on_look = note_look
    assert looked.wait(60.0)
    assert progress.now() - before_s < 500_000.0
    host.stop()
