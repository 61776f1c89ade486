"""Authenticator: which keys admit which callers, and how other calls are refused."""

import asyncio
import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from baton.clock import VirtualClock
from baton.config import GatewayConfig
from baton.errors import ConfigError, KeysUnavailable, PermissionDenied, RateLimited, Unauthenticated
from baton.system.watched import LOST_GRACE_S
from gateway.auth import authenticator as authenticator_module
from gateway.auth.authenticator import Authenticator, _read_key_store
from gateway.auth.callers import ANYBODY, Caller, Right
from gateway.auth.key_store import KeyStore, hash_of, new_key
from tests.factories.api_keys import ADMIN, ALICE, API_KEYS, WATCHER, entry

WITH_KEYS = GatewayConfig(api_keys=API_KEYS)
KEYS = [new_key() for _ in range(3)]


def bearer(key: str) -> list[str]:
    return [f"Bearer {key}"]


def admit(authenticator: Authenticator, authorizations: Sequence[str], right: Right | None) -> Caller:
    """As locks do it."""
    caller = asyncio.run(authenticator.caller_of(authorizations))
    authenticator.admit(caller, right)
    return caller


def test_keys_open_what_their_scopes_say() -> None:
    authenticator = Authenticator(WITH_KEYS, VirtualClock())
    assert admit(authenticator, bearer(ALICE), Right.GENERATE).name == "alice"
    assert (
        admit(authenticator, ["bearer   " + ALICE], None).name == "alice"
    )  # RFC 7235: the scheme in any case
    assert admit(authenticator, bearer(WATCHER), Right.OBSERVE).name == "watcher"
    assert admit(authenticator, bearer(ADMIN), Right.ADMINISTER).may_administer
    with pytest.raises(PermissionDenied, match="scope 'administer', which the key of 'alice' lacks"):
        admit(authenticator, bearer(ALICE), Right.ADMINISTER)
    with pytest.raises(PermissionDenied, match="scope 'generate', which the key of 'watcher' lacks"):
        admit(authenticator, bearer(WATCHER), Right.GENERATE)


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {ALICE}"],
        [ALICE],
        bearer("baton-wrong"),
        bearer(hash_of(ALICE)),
        [f"Bearer {ALICE}", f"Bearer {ALICE}"],
        bearer(f"{ALICE} {ALICE}"),
    ],
)
def test_only_this_gateways_keys_admit_a_caller(shown: list[str]) -> None:
    with pytest.raises(Unauthenticated) as refused:
        admit(Authenticator(WITH_KEYS, VirtualClock()), shown, None)
    assert ALICE not in str(refused.value)
    assert "baton-wrong" not in str(refused.value)


def test_on_loopback_without_keys_everybody_may_do_everything_whatever_key_they_show() -> None:
    authenticator = Authenticator(GatewayConfig(), VirtualClock())
    assert admit(authenticator, [], Right.ADMINISTER) is ANYBODY
    assert admit(authenticator, bearer("EMPTY"), Right.ADMINISTER) is ANYBODY


def test_anonymous_callers_beside_keys_may_only_generate() -> None:
    authenticator = Authenticator(GatewayConfig(api_keys=API_KEYS, allow_anonymous=True), VirtualClock())
    assert admit(authenticator, [], Right.GENERATE).name == "anybody"
    for right in (Right.OBSERVE, Right.ADMINISTER):
        with pytest.raises(PermissionDenied, match=f"needs an API key with the scope '{right.value}'"):
            admit(authenticator, [], right)
    with pytest.raises(Unauthenticated):  # a key that was withdrawn is no reason to go on without one
        admit(authenticator, bearer("baton-withdrawn"), Right.GENERATE)


def test_off_loopback_callers_without_a_key_may_only_generate() -> None:
    authenticator = Authenticator(GatewayConfig(host="0.0.0.0", allow_anonymous=True), VirtualClock())
    assert admit(authenticator, bearer("EMPTY"), Right.GENERATE).best_priority == 0
    for right in (Right.OBSERVE, Right.ADMINISTER):
        with pytest.raises(PermissionDenied, match=f"scope '{right.value}'"):
            admit(authenticator, [], right)


def test_only_what_generates_counts_against_a_rate() -> None:
    clock = VirtualClock()
    authenticator = Authenticator(GatewayConfig(api_keys=(entry("a", "k", requests_per_minute=1),)), clock)
    for _ in range(5):
        admit(authenticator, bearer("k"), None)
    admit(authenticator, bearer("k"), Right.GENERATE)
    with pytest.raises(RateLimited):
        admit(authenticator, bearer("k"), Right.GENERATE)
    clock.advance(60.0)
    admit(authenticator, bearer("k"), Right.GENERATE)


def write(path: Path, *keys: str) -> None:
    path.write_text("".join(f"- name: n{i}\n  sha256: {hash_of(key)}\n" for i, key in enumerate(keys)))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # two writes within a tick of the file system's clock


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", VirtualClock()
    old, new = new_key(), new_key()
    write(path, old)
    authenticator = Authenticator(GatewayConfig(api_keys=API_KEYS, api_keys_file=str(path)), clock)
    assert admit(authenticator, bearer(old), None).name == "n0"
    assert admit(authenticator, bearer(ALICE), None).name == "alice"
    write(path, old, new)
    clock.advance(1.0)
    assert {admit(authenticator, bearer(key), None).name for key in (old, new)} == {"n0", "n1"}
    write(path, new)
    clock.advance(1.0)
    with pytest.raises(Unauthenticated):
        admit(authenticator, bearer(old), None)


def test_a_broken_key_file_changes_nothing_and_is_logged_without_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock, key = tmp_path / "keys.yaml", VirtualClock(), new_key()
    write(path, key)
    authenticator = Authenticator(GatewayConfig(api_keys_file=str(path)), clock)
    for broken in (f"- {key}", f"- name: a\n  sha256: {key}\n", f'"{key}', f"{key}: [", "- name: a\n"):
        path.write_text(broken)
        clock.advance(1.0)
        with caplog.at_level(logging.DEBUG, "baton"):
            assert admit(authenticator, bearer(key), None).name == "n0"
    assert "cannot be used; keeping the previous content" in caplog.text
    assert len(caplog.records) == 5
    assert key not in caplog.text


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
        (lambda path: path.chmod(0o620), "other users may write this file"),
        (lambda path: path.chmod(0o602), "other users may write this file"),
    ],
)
def test_a_key_file_that_is_gone_or_that_others_may_write_admits_no_caller(
    lose: Callable[[Path], object], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock, key = tmp_path / "keys.yaml", VirtualClock(), new_key()
    write(path, key)
    authenticator = Authenticator(GatewayConfig(api_keys=API_KEYS, api_keys_file=str(path)), clock)
    lose(path)
    clock.advance(1.0)
    assert admit(authenticator, bearer(key), None).name == "n0", "it may be about to be replaced"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert says in record.getMessage()
    for _ in range(3):
        clock.advance(LOST_GRACE_S)
        for shown in (key, "baton-wrong"):
            with pytest.raises(KeysUnavailable, match="cannot use its file of API keys"):
                admit(authenticator, bearer(shown), None)
        assert admit(authenticator, bearer(ALICE), None).name == "alice", "a key of the configuration"
    assert len(caplog.records) == 1
    if path.is_dir():
        path.rmdir()
    write(path, key)
    path.chmod(0o600)
    clock.advance(1.0)
    assert admit(authenticator, bearer(key), None).name == "n0"
    with pytest.raises(Unauthenticated):
        admit(authenticator, bearer("baton-wrong"), None)


def test_a_key_file_that_could_not_be_opened_is_tried_again_though_it_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock, keys = tmp_path / "keys.yaml", VirtualClock(), [new_key(), new_key()]
    write(path, keys[0])
    authenticator = Authenticator(GatewayConfig(api_keys_file=str(path)), clock)
    write(path, *keys)
    with monkeypatch.context() as patch:
        error = OSError(errno.EMFILE, "Too many open files")
        patch.setattr(authenticator_module, "open_regular", Mock(side_effect=error))
        clock.advance(1.0)
        assert admit(authenticator, bearer(keys[0]), None).name == "n0"
    clock.advance(LOST_GRACE_S)
    assert admit(authenticator, bearer(keys[1]), None).name == "n1"


def test_a_key_file_that_is_replaced_in_steps_is_never_missed(tmp_path: Path) -> None:
    """A link to a folder of the day, as Kubernetes mounts Secrets, and a file that is away for a moment."""
    clock, keys = VirtualClock(), [new_key() for _ in range(3)]
    for number, key in enumerate(keys[:2]):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "keys.yaml", key)
    data, path = tmp_path / "data", tmp_path / "keys.yaml"
    data.symlink_to("0")
    path.symlink_to("data/keys.yaml")
    authenticator = Authenticator(GatewayConfig(api_keys_file=str(path)), clock)
    assert admit(authenticator, bearer(keys[0]), None).name == "n0"
    (tmp_path / "new").symlink_to("1")
    (tmp_path / "new").rename(data)
    clock.advance(1.0)
    assert admit(authenticator, bearer(keys[1]), None).name == "n0"
    (tmp_path / "1" / "keys.yaml").unlink()
    clock.advance(LOST_GRACE_S - 1.0)
    assert admit(authenticator, bearer(keys[1]), None).name == "n0"
    write(tmp_path / "1" / "keys.yaml", keys[2])
    clock.advance(LOST_GRACE_S)
    assert admit(authenticator, bearer(keys[2]), None).name == "n0"


class SlowKeyFile:
    """A gateway's key file. Reading the file again takes until `may_read` is set."""

    def __init__(self, path: Path) -> None:
        self.clock, self.path, self.may_read = VirtualClock(), path, threading.Event()
        self.readers: list[threading.Thread] = []
        write(path, KEYS[0])
        self.authenticator = Authenticator(GatewayConfig(api_keys_file=str(path)), self.clock)
        self.authenticator._key_store._read = self._read  # type: ignore[union-attr]

    def _read(self) -> KeyStore:
        self.readers.append(threading.current_thread())
        assert self.may_read.wait(60)
        return _read_key_store(self.path, ())

    async def caller_of(self, key: str) -> str:
        return (await self.authenticator.caller_of(bearer(key))).name


async def test_c58_calls_wait_for_a_changed_key_file_and_the_event_loop_does_not(tmp_path: Path) -> None:
    file = SlowKeyFile(tmp_path / "keys.yaml")
    write(file.path, *KEYS[1:])
    file.clock.advance(1.0)
    calls = [asyncio.create_task(file.caller_of(key)) for key in KEYS]
    while not file.readers:
        await asyncio.sleep(0)
    file.clock.advance(1.0)
    calls.append(asyncio.create_task(file.caller_of(KEYS[2])))
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    file.may_read.set()
    revoked, *callers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(revoked, Unauthenticated)
    assert callers == ["n0", "n1", "n1"]
    assert len(file.readers) == 1
    assert file.readers != [threading.current_thread()]


def test_nothing_is_collected_while_a_key_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection would stop the event loop's thread, too."""
    path = tmp_path / "keys.yaml"
    write(path, new_key())
    monkeypatch.setattr(authenticator_module, "KeyStore", lambda _: gc.isenabled())
    assert _read_key_store(path, ()) is False  # type: ignore[comparison-overlap]
    assert gc.isenabled()


async def test_previous_keys_count_until_a_slow_key_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlowKeyFile(tmp_path / "keys.yaml")
    write(file.path, KEYS[1])
    with monkeypatch.context() as patch:
        patch.setattr(authenticator_module, "READ_TIMEOUT_S", 0.0)
        for _ in range(2):
            file.clock.advance(1.0)
            assert await file.caller_of(KEYS[0]) == "n0"
    file.may_read.set()
    assert await file.caller_of(KEYS[1]) == "n0"


async def test_a_key_file_is_read_though_no_thread_started_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlowKeyFile(tmp_path / "keys.yaml")
    write(file.path, KEYS[1])
    file.clock.advance(1.0)
    file.may_read.set()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", AsyncMock(side_effect=RuntimeError("can't start new thread")))
        assert await file.caller_of(KEYS[0]) == "n0"
    file.clock.advance(1.0)
    assert await file.caller_of(KEYS[1]) == "n0"


@pytest.mark.parametrize("mode", [0o646, 0o660])
def test_a_key_file_that_is_missing_or_that_others_may_write_is_refused_at_the_start(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    write(path, new_key())
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"other users may write this file.*run `chmod go-w"):
        Authenticator(GatewayConfig(api_keys_file=str(path)), VirtualClock())
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        Authenticator(GatewayConfig(api_keys_file=str(tmp_path / "none")), VirtualClock())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot be read: it is not a regular file"):
        Authenticator(GatewayConfig(api_keys_file=str(tmp_path / "pipe")), VirtualClock())


def test_entries_of_a_key_file_may_share_values(tmp_path: Path) -> None:
    """A merged mapping may have the same keys, in each form that YAML allows."""
    digests = ["a" * 63 + str(number) for number in range(3)]
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"- &a {{name: a, sha256: {digests[0]}, max_concurrent: 3}}\n"
        f"- {{<<: &b {{<<: *a, name: b, sha256: {digests[1]}}}, name: c, sha256: {digests[2]}}}\n"
        "- *b\n"
        f"- {{<<: *a, <<: {{name: d}}, name: e, sha256: {'b' * 64}}}\n"
    )
    path.chmod(0o600)
    Authenticator(GatewayConfig(api_keys_file=str(path)), VirtualClock())


def test_an_empty_key_file_admits_no_caller(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.touch()
    with pytest.raises(Unauthenticated):
        admit(Authenticator(GatewayConfig(api_keys_file=str(path)), VirtualClock()), [], None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- name: a\n", "sha256"),
        ("- name: a\n  sha256: baton-secret\n", "64 hexadecimal digits"),
        ("- baton-secret\n", "must be a mapping"),
        ("{baton-secret", "neither YAML nor JSON"),
        ("- {name: 2026-02-30, sha256: baton-secret}", "neither YAML nor JSON"),
        ("- !!bool baton-secret", "neither YAML nor JSON"),
        ("- !!timestamp baton-secret", "neither YAML nor JSON"),
        ("- {name: baton-secret, sha256: !!int ''}", "neither YAML nor JSON"),
        (
            "- {name: anybody, sha256: " + "0" * 64 + "}",
            "'anybody' is Baton's name for callers without a key",
        ),
        ("- {name: a, sha256: " + "0" * 64 + ", scopes: [root]}", "scopes"),
        ("- {name: a, sha256: " + "0" * 64 + ", max_concurent: 1}", "0: has an unknown key"),
        ("- {name: a, sha256: " + "0" * 64 + ", baton-secret: 1}", "0: has an unknown key"),
        ("- {name: a, sha256: " + "0" * 64 + ",\n   name: b}", "has a key twice in the mapping in line 1"),
        ("- {name: a, baton-secret: 1, baton-secret: 2}", "has a key twice in the mapping in line 1"),
        ("baton-secret\n", "got a value of type str"),
        ("a: baton-secret\n", "got a value of type dict"),
        ("- {name: 'a baton-secret', sha256: " + "0" * 64 + "}", "name: got a value of type str"),
        ("- {name: a, sha256: [baton-secret]}", "sha256: got a value of type list"),
        ("- {name: a, sha256: " + "0" * 64 + ", scopes: baton-secret}", "scopes: got a value of type str"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_named_and_its_secrets_are_not(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        Authenticator(GatewayConfig(api_keys_file=str(path)), VirtualClock())
    assert f"gateway.api_keys_file {path}" in str(caught.value)
    assert "baton-secret" not in str(caught.value)
