"""A worker's metrics: what it tells of itself, over a real port; and a port that others cannot hold up for long."""

import errno
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import ConfigError
from baton.kv import TransferRole, WorkerRef
from baton.system.addresses import listen_tcp
from baton.version import UNINSTALLED
from baton.worker import (
    KVBlockCounts,
    KVPeerCounts,
    RequestCounts,
    WorkerLoad,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from worker.metrics import WorkerMetrics
from worker.metrics_server import MAX_READERS, MetricsServer, Render
from worker.step_counts import StepCounts

STATUS = WorkerStatus(
    WorkerRef("w0", "a-incarnation", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.DECODE,
    WorkerState.READY,
    KVBlockCounts(total=100, free=60, leased=10, quarantined=5, host_total=8, host_used=3),
    RequestCounts(running=4, waiting=3, waiting_for_remote_kvs=2),
    {
        "preemptions": 7,
        "prefix_cache_hits": 32,
        "kv_denied_peers": 1,
        "kv_checksum_failures": 9,
        "spec_decode_num_drafts": 6,
        "spec_decode_num_draft_tokens": 24,
        "spec_decode_num_accepted_tokens": 8,
        "spec_decode_num_accepted_tokens_per_pos_0": 5,
        "spec_decode_num_accepted_tokens_per_pos_1": 3,
    },
    (KVPeerCounts(TransferRole.CONSUMER, "w1", "shared_memory", 5, 1, 0, 4096, 0.5, 0.25, 0.0),),
    load=WorkerLoad(700, 0.5, 1500.0, 0.03),
)


def families(steps: StepCounts, memory: dict[str, int]) -> dict[str, Metric]:
    metrics = WorkerMetrics(lambda: STATUS, steps, lambda: memory, lambda: 0.5)
    body, _ = metrics.render("")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(family: Metric, **labels: str) -> float:
    (sample,) = (
        s for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")
    )
    return sample.value


def test_a_worker_of_a_tree_that_is_not_installed_exports_its_metrics_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(_: str) -> None:
        raise PackageNotFoundError("baton")

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    assert value(families(StepCounts(), {})["baton_worker_info"], version=UNINSTALLED) == 1


def test_a_worker_exports_its_state_and_its_counters() -> None:
    steps = StepCounts()
    steps.done(num_prompt_tokens=100, num_decode_tokens=3, time_s=0.04)
    steps.done(num_prompt_tokens=0, num_decode_tokens=4, time_s=0.01)
    exported = families(steps, {"total": 80, "free": 20})
    assert all(
        sample.labels["worker"] == "w0"
        for f in exported.values()
        for sample in f.samples
        if "baton" in f.name
    )
    for name, expected in (
        *(("num_requests_running", 4), ("num_requests_waiting", 3), ("num_requests_loading", 2)),
        *(
            ("num_preemptions", 7),
            ("prefix_cache_hits", 32),
            ("prefix_cache_queries", 0),
            ("kv_peer_bytes", 4096),
        ),
        ("worker_queued_prompt_tokens", 700),
        ("worker_borrowed_cpu_seconds", 0.5),
        ("spec_decode_num_drafts", 6),
        ("spec_decode_num_draft_tokens", 24),
        ("spec_decode_num_accepted_tokens", 8),
    ):
        assert value(exported[f"baton_{name}"]) == expected, name
    assert value(exported["baton_kv_cache_usage_perc"], role="decode") == pytest.approx(0.4)
    assert value(exported["baton_kv_blocks"], state="referenced") == 25
    assert value(exported["baton_host_kv_blocks"], state="free") == 5
    assert value(exported["baton_denied_peers"], plane="kv") == 1
    assert value(exported["baton_worker_events"], event="kv_checksum_failures") == 9
    assert len(exported["baton_worker_events"].samples) == 1
    per_place = exported["baton_spec_decode_num_accepted_tokens_per_pos"]
    assert [value(per_place, position=str(place)) for place in (0, 1)] == [5, 3]
    assert value(exported["baton_kv_peer_handovers"], outcome="failed", peer="w1") == 1
    assert value(exported["baton_kv_peer_seconds"], phase="moving", transport="shared_memory") == 0.25
    assert value(exported["baton_worker_computed_tokens"], kind="prompt") == 100
    assert value(exported["baton_device_memory_bytes"], kind="free") == 20
    assert (
        value(exported["baton_worker_info"], incarnation="a-incarnation", state="ready", block_size="16") == 1
    )
    sums = {
        s.labels["kind"]: s.value for s in exported["baton_step_seconds"].samples if s.name.endswith("_sum")
    }
    assert sums == {"prefill": 0.04, "decode": 0.01}
    counts = [s.value for s in exported["baton_iteration_tokens_total"].samples if s.name.endswith("_count")]
    assert counts == [2]


@contextmanager
def served(render: Render) -> Iterator[str]:
    listener, address = listen_tcp("127.0.0.1", None, 0, "network.metrics_port")
    server = MetricsServer(listener, render)
    server.start()
    try:
        yield address
    finally:
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener_address(address))


def listener_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_metrics_are_served_there_and_nothing_else_is() -> None:
    with served(lambda accept: (b"said " + accept.encode(), "text/x")) as address:
        request = urllib.request.Request(f"http://{address}/metrics", headers={"accept": "a/b"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert (answer.read(), answer.headers["content-type"]) == (b"said a/b", "text/x")
            assert "Python" not in answer.headers["server"]
        head = urllib.request.Request(f"http://{address}/metrics", headers={"accept": "a/b"}, method="HEAD")
        with urllib.request.urlopen(head, timeout=10) as answer:
            assert (answer.read(), answer.headers["content-length"]) == (b"", "8")
        with pytest.raises(HTTPError) as refused:
            urllib.request.urlopen(f"http://{address}/", timeout=10)
        with refused.value:
            assert refused.value.code == 404


def test_a_silent_leaving_or_failing_reader_delays_no_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.metrics_server.PATIENCE_S", 0.2)
    errors = [ValueError("a bug")]

    def render(_accept: str) -> tuple[bytes, str]:
        if errors:
            raise errors.pop()
        return b"ok", "text/plain"

    with served(render) as address, socket.create_connection(listener_address(address)):  # says nothing
        socket.create_connection(listener_address(address)).close()
        with pytest.raises(ConnectionError):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=10)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.read() == b"ok"


def test_silent_readers_delay_no_other_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more silent readers than places, and they wait for longer than this test."""
    monkeypatch.setattr("worker.metrics_server.PATIENCE_S", 3600.0)
    with served(lambda _accept: (b"ok", "text/plain")) as address, ExitStack() as stack:
        for _ in range(3 * MAX_READERS):
            stack.enter_context(socket.create_connection(listener_address(address)))
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            assert answer.read() == b"ok"
        assert sum(each.name == "metrics-reader" for each in threading.enumerate()) <= MAX_READERS


class ShortOfFiles(socket.socket):
    """Has no file for the first connection."""

    has_failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_where_files_run_out_metrics_are_read_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lack of files once ended the thread, and nothing said so."""
    monkeypatch.setattr("worker.metrics_server.PAUSE_S", 0.01)
    listener = ShortOfFiles()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    host, port = listener.getsockname()
    server = MetricsServer(listener, lambda _accept: (b"ok", "text/plain"))
    server.start()
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        assert answer.read() == b"ok"
    server.stop()
    assert listener.has_failed
    assert "cannot accept a metrics connection, retrying: [Errno 24] Too many open files" in caplog.text


def test_a_thread_that_does_not_start_costs_its_reader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(lambda _accept: (b"ok", "text/plain")) as address:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            refused = socket.create_connection(listener_address(address), timeout=60)
            with refused:
                assert refused.recv(1) == b""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.read() == b"ok"


def test_a_reader_that_asks_a_byte_at_a_time_does_not_keep_others_from_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server limits the time of all bytes together. Each single byte comes well within this limit."""
    monkeypatch.setattr("worker.metrics_server.PATIENCE_S", 0.5)
    is_over = threading.Event()

    def dribble(connection: socket.socket) -> None:
        with suppress(OSError):  # the server has had enough
            while not is_over.wait(0.02):
                connection.sendall(b"G")

    with (
        served(lambda _accept: (b"ok", "text/plain")) as address,
        socket.create_connection(listener_address(address)) as connection,
    ):
        dribbling = threading.Thread(target=dribble, args=(connection,))
        dribbling.start()
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
                assert answer.read() == b"ok"
        finally:
            is_over.set()
            dribbling.join()


def test_a_port_that_is_taken_is_an_error_that_names_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"network.metrics_port: cannot listen on 127.0.0.1:{port}"):
            listen_tcp("127.0.0.1", None, port, "network.metrics_port")


def test_the_advertised_host_and_the_real_port_are_published() -> None:
    listener, address = listen_tcp("127.0.0.1", "here.example", 0, "network.metrics_port")
    with listener:
        assert address == f"here.example:{listener.getsockname()[1]}"
