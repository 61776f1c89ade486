"""ConnectionPlaces: who makes room for a new connection, as a table of who came, who is served, and who goes."""

import pytest

from baton.errors import Overloaded
from gateway.http.connection_places import ConnectionPlaces, network_of


def entered(number: int, addresses: str) -> ConnectionPlaces[int]:
    """One connection from each address, a letter; they are numbered as they came."""
    places = ConnectionPlaces[int](number)
    for connection, address in enumerate(addresses):
        places.enter(connection, address)
    return places


def displaced(places: ConnectionPlaces[int], times: int) -> list[int | None]:
    """The connections that make room, one after another; no new connection takes their places."""
    gone = []
    for _ in range(times):
        gone.append(places.victim())
        if gone[-1] is not None:
            places.leave(gone[-1])
    return gone


def test_the_address_with_the_most_strangers_loses_its_oldest_one() -> None:
    assert displaced(entered(6, "abbbcc"), 7) == [1, 2, 4, 0, 3, 5, None]


def test_a_flood_displaces_only_itself() -> None:
    places = entered(64, "v" + "f" * 63)
    for connection in range(64, 1000):
        assert places.is_full
        victim = places.victim()
        assert victim
        places.leave(victim)
        places.enter(connection, "f")
    assert len(places) == 64
    assert 0 in places._group_of, "the visitor from another address is still there"


def test_callers_with_keys_make_room_only_where_few_strangers_are_left() -> None:
    places = entered(8, "aaaaaaaa")
    for connection in range(5):
        places.begin_request(connection, "alice", is_stranger=False)
        places.end_request(connection)
    # Three strangers are more than a quarter of the places.
    assert displaced(places, 1) == [5]
    places.begin_request(0, "alice", is_stranger=False)
    places.end_request(0)
    assert displaced(places, 5) == [1, 2, 3, 4, 0], "the one that was served last goes last"
    assert displaced(places, 3) == [6, 7, None]


def test_a_connection_whose_caller_is_being_looked_up_is_not_idle() -> None:
    places = entered(4, "aab")
    places.hold(0)
    places.hold(0)
    places.hold(3)  # it was displaced before
    assert displaced(places, 3) == [1, 2, None]
    places.begin_request(0, "alice", is_stranger=False)
    places.end_request(0)
    assert displaced(places, 2) == [0, None]
    places.enter(4, "a")
    places.hold(4)
    places.end_request(4)  # it was refused
    assert displaced(places, 1) == [4]


def test_the_caller_with_the_most_idle_connections_makes_room() -> None:
    places = entered(4, "aaaa")
    for connection, caller in enumerate(("alice", "bob", "bob", "bob")):
        places.begin_request(connection, caller, is_stranger=False)
        places.end_request(connection)
    assert displaced(places, 4) == [1, 2, 0, 3]


def test_a_running_request_keeps_its_connection() -> None:
    places = entered(4, "aabb")
    places.begin_request(0, "anybody", is_stranger=True)
    places.begin_request(2, "alice", is_stranger=False)
    assert displaced(places, 3) == [1, 3, None]
    places.end_request(0)
    places.end_request(0)
    assert displaced(places, 2) == [0, None]


def test_one_callers_requests_leave_a_quarter_of_the_places_to_others() -> None:
    places = entered(4, "aaaa")
    for connection in range(3):
        places.begin_request(connection, "alice", is_stranger=False)
    with pytest.raises(Overloaded, match="'alice' run on 3 of 4 connections"):
        places.begin_request(3, "alice", is_stranger=False)
    assert places.victim() == 3, "it is still a stranger's"
    places.begin_request(3, "bob", is_stranger=False)
    places.end_request(0)
    places.begin_request(0, "alice", is_stranger=False)
    places.leave(1)
    places.begin_request(1, "bob", is_stranger=False)  # a displaced connection's last request
    assert (len(places), places.victim()) == (3, None)


def test_a_single_place_is_for_anyone() -> None:
    places = entered(1, "a")
    places.begin_request(0, "alice", is_stranger=False)
    places.end_request(0)
    assert displaced(places, 2) == [0, None]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1::7", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::8", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_subscriber_is_one_address(address: str, network: str) -> None:
    assert network_of(address) == network
