"""KeyStore: keys are known by their hashes, and only whole."""

import hashlib

import pytest

from baton.config import ApiKey
from baton.errors import ConfigError
from gateway.auth.callers import Right
from gateway.auth.key_store import KeyStore, hash_of, new_key
from tests.factories.api_keys import entry


def test_only_the_key_itself_finds_its_owner() -> None:
    key = new_key()
    ring = KeyStore([entry("alice", key), entry("bob", new_key())])
    caller = ring.caller(key)
    assert caller is not None
    assert caller.name == "alice"
    digest = hash_of(key)
    for wrong in (key[:-1], key + " ", key.upper(), digest, "", new_key(), "\udcff", "ключ"):
        assert ring.caller(wrong) is None


def test_keys_are_256_random_bits_and_hashed_as_others_would() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {len("baton-") + 43}  # 43 characters of 6 bits
    key = keys.pop()
    assert hash_of(key) == hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("scopes", "rights"),
    [
        (["generate"], {Right.GENERATE}),
        (["observe"], {Right.OBSERVE}),
        (["administer"], {Right.OBSERVE, Right.ADMINISTER}),
        (["generate", "administer"], set(Right)),
    ],
)
def test_scopes_grant_rights(scopes: list[str], rights: set[Right]) -> None:
    caller = KeyStore([entry("a", "k", scopes=scopes)]).caller("k")
    assert caller is not None
    assert {right for right in Right if caller.may(right)} == rights


def test_a_caller_may_have_two_keys_while_one_replaces_the_other() -> None:
    ring = KeyStore(
        [
            entry("alice", "old", max_concurrent=3),
            entry("alice", "new", max_concurrent=3, scopes=["generate"]),
        ]
    )
    assert ring.caller("old") == ring.caller("new")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([entry("a", "k"), entry("b", "k")], "'b' and 'a' have the same sha256"),
        (
            [entry("a", "k"), entry("a", "l", max_concurrent=1)],
            "two keys have the name 'a', but differ in more than",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: list[ApiKey], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        KeyStore(keys)
