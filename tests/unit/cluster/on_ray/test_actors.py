"""What a worker's actor makes of the configuration on its node."""

import threading

import pytest

from baton.config import BatonConfig
from cluster.on_ray.actors import Latest, on_node


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


def test_only_the_latest_value_is_taken_and_none_after_the_last() -> None:
    latest = Latest[int]()
    latest.put(1)
    latest.put(2)
    assert latest.take() == 2
    latest.put(3)
    latest.close()
    assert latest.take() == 3
    assert latest.take() is None


def test_taking_waits_for_a_value() -> None:
    latest = Latest[str]()
    taken: list[str | None] = []
    taker = threading.Thread(target=lambda: taken.append(latest.take()))
    taker.start()
    latest.put("there")
    taker.join(60)
    assert taken == ["there"]
