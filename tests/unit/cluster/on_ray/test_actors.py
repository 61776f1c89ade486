"""What a worker's actor makes of the configuration on its node."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.config import BatonConfig, NetworkConfig
from baton.errors import ConfigError, ModelError
from baton.system.curve import derive_keys
from baton.system.secret import SECRET_VARIABLE
from baton.worker import StartProgress, WorkerRole
from cluster.control_api.configuration import keys_digest
from cluster.on_ray.actors import Latest, StartWorker, WorkerActor, keys_of_node, on_node
from tests.factories.security import OTHER_SECRET, SECRET


@pytest.mark.parametrize(
    ("network", "advertised"),
    [
        ({"bind_host": "0.0.0.0"}, "10.0.0.7"),
        ({"bind_host": "::"}, "10.0.0.7"),
        ({"bind_host": "0.0.0.0", "advertise_host": "192.0.2.9"}, "192.0.2.9"),
        ({"bind_host": "eth0"}, None),
        ({}, None),
    ],
)
def test_a_worker_that_listens_everywhere_is_reached_where_its_node_is(
    network: dict[str, str], advertised: str | None
) -> None:
    config = BatonConfig.from_mapping({"network": {**network, "peer_timeout_s": 3.0}})
    placed = on_node(config, "10.0.0.7")
    assert placed.network.advertise_host == advertised
    assert (placed.network.bind_host, placed.network.peer_timeout_s) == (config.network.bind_host, 3.0)


def test_a_worker_takes_the_secret_of_its_node_and_refuses_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys, network = derive_keys(SECRET), NetworkConfig(secret_file=str(tmp_path / "secret"))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)
    assert keys_of_node(network, keys_digest(keys)) == keys
    monkeypatch.setenv(SECRET_VARIABLE, OTHER_SECRET.text)
    with pytest.raises(
        ConfigError, match=r"differs from that of the command that started the fleet; give this node"
    ):
        keys_of_node(network, keys_digest(keys))
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(ConfigError, match="does not exist; copy it"):
        keys_of_node(network, keys_digest(keys))
    assert not (tmp_path / "secret").exists(), "a worker makes none"
    assert keys_of_node(NetworkConfig(security="none"), keys_digest(derive_keys(None))) == derive_keys(None)


def test_only_the_latest_value_is_taken_and_none_after_the_last() -> None:
    latest = Latest[int]()
    latest.put(1)
    latest.put(2)
    assert latest.take_newest() == 2
    latest.put(3)
    latest.close()
    assert latest.take_newest() == 3
    assert latest.take_newest() is None


def test_taking_waits_for_a_value() -> None:
    latest = Latest[str]()
    taken: list[str | None] = []
    taker = threading.Thread(target=lambda: taken.append(latest.take_newest()))
    taker.start()
    latest.put("there")
    taker.join(60)
    assert taken == ["there"]


def test_a_download_is_progress_and_a_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the host that began the fleet may not be here, or hold no weights: `folder_here` downloads them."""
    monkeypatch.setattr("cluster.on_ray.actors.write_logs", lambda *_, **__: None)
    actor = WorkerActor(BatonConfig(), "", tmp_path, WorkerRole.DECODE, "w0")
    with caplog.at_level(logging.INFO, logger="cluster.on_ray.actors"):
        actor._report_download("downloading acme/tiny: 1 of 4 GB", 0.25)
    assert actor._progress.take_newest() == StartProgress("downloading acme/tiny: 1 of 4 GB", 250, 1000)
    assert caplog.messages == ["downloading acme/tiny: 1 of 4 GB"]


def test_a_repeated_start_waits_for_the_first_and_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.on_ray.actors.write_logs", lambda *_, **__: None)
    actor = WorkerActor(BatonConfig(), "", tmp_path, WorkerRole.DECODE, "w0")
    endpoint, may_load, num_loads = Mock(), threading.Event(), 0

    def load(_share: None) -> Mock:
        nonlocal num_loads
        num_loads += 1
        may_load.wait(60)
        actor._endpoint = endpoint
        return endpoint

    monkeypatch.setattr(actor, "_start", load)
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(actor._answer, StartWorker(None)) for _ in range(2)]
        may_load.set()
        assert [start.result(60) for start in starts] == [endpoint, endpoint]
    assert num_loads == 1


def test_a_repeated_start_fails_as_the_first_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the first may be lost. Its worker has closed the stream of progress."""
    monkeypatch.setattr("cluster.on_ray.actors.write_logs", lambda *_, **__: None)
    actor = WorkerActor(BatonConfig(), "", tmp_path, WorkerRole.DECODE, "w0")
    load = Mock(side_effect=[ModelError("no config.json"), Mock()])
    monkeypatch.setattr(actor, "_start", load)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^no config\.json$"):
            actor._answer(StartWorker(None))
    load.assert_called_once()
