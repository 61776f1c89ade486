"""Derived keys: the same for all who have the secret, different for every purpose, and never in a text."""

import pickle
from dataclasses import astuple
from itertools import chain

import pytest
import zmq

from baton.errors import ConfigError
from baton.system.curve import ClusterSecret, PlaneKeys, derive_keys
from tests.factories.security import KEYS, OTHER_KEYS, SECRET


def every_key() -> list[bytes]:
    keys = [KEYS.request, KEYS.kv, OTHER_KEYS.request, OTHER_KEYS.kv]
    return [
        *chain.from_iterable(astuple(plane) for plane in keys if plane is not None),
        KEYS.prefix,
        OTHER_KEYS.prefix,
    ]


def test_keys_are_what_every_other_process_derives() -> None:
    """Pinned: a process of another version would derive others and be locked out."""
    assert KEYS.request is not None
    assert KEYS.kv is not None
    assert KEYS.request.server_public == b"F(pBMV0G-^?xP)9SC@Z.)=yQ-46:8sH.h94)[{oe"
    assert KEYS.kv.client_public == b"EA/mbg[4MOA1Ofprn>K=1-/@e?$8=Kx&pai5=Q5?"
    assert KEYS.prefix.hex().startswith("bd3f6bab423beacf")
    assert derive_keys(ClusterSecret(SECRET.text)) == KEYS


def test_every_plane_side_and_secret_has_a_key_of_its_own() -> None:
    keys = every_key()
    assert len(set(keys)) == len(keys) == 18


def test_a_public_key_belongs_to_its_secret_key() -> None:
    for plane in (KEYS.request, KEYS.kv):
        assert plane is not None
        assert zmq.curve_public(plane.server_secret) == plane.server_public
        assert zmq.curve_public(plane.client_secret) == plane.client_public


@pytest.mark.parametrize("value", [SECRET, KEYS, KEYS.request], ids=["secret", "keys", "plane"])
def test_no_text_of_a_value_shows_what_it_protects(value: object) -> None:
    hidden = [SECRET.text, *[key.decode("latin-1") for key in every_key()]]
    for text in (repr(value), str(value), f"{value}", f"{value!r}", repr([value])):
        assert not [secret for secret in hidden if secret in text or repr(secret)[1:-1] in text]


def test_keys_travel_to_an_actor() -> None:
    assert pickle.loads(pickle.dumps(KEYS)) == KEYS


def test_a_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="at least 16 characters, this one has 15") as caught:
        ClusterSecret("fifteen letters")
    assert "fifteen" not in str(caught.value)
    assert ClusterSecret("sixteen letters!").text == "sixteen letters!"


def test_a_secret_of_random_bytes_is_refused() -> None:
    """Processes get the secret in their environment, which cannot have a zero byte."""
    with pytest.raises(ConfigError, match="zero byte; make one with `openssl rand -hex 32`") as caught:
        ClusterSecret("hush" * 8 + "\0")
    assert "hush" not in str(caught.value)


def test_no_secret_no_keys() -> None:
    assert [derive_keys(None).request, derive_keys(None).kv] == [None, None]
    assert 16 <= len(derive_keys(None).prefix) <= 64, (
        "what BLAKE2b takes: prefixes are called by name all the same"
    )


def test_a_libzmq_without_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConfigError, match=r"network\.security is 'curve', but libzmq"):
        derive_keys(SECRET)


def test_plane_keys_are_compared_by_value() -> None:
    assert KEYS.kv is not None
    assert KEYS.kv == PlaneKeys(*astuple(KEYS.kv))
    assert KEYS.kv != KEYS.request
