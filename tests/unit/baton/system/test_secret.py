"""Where the cluster's secret comes from, and every way in which it must not."""

import multiprocessing
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from baton.config import NetworkConfig
from baton.errors import ConfigError
from baton.system.secret import SECRET_VARIABLE, default_secret_path, load_secret

NUM_RACES = 100
TEXT = "no-longer-than-it-must-be"


def read(path: Path, *, may_create: bool = False) -> str:
    secret = load_secret(NetworkConfig(secret_file=str(path)), {}, may_create=may_create)
    assert secret is not None
    return secret.text


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(TEXT + "\n")
    return path


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_the_first_serve_makes_a_file_that_only_its_owner_can_read(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "baton" / "cluster.secret"
    path.parent.mkdir(0o700)  # which an umask of 0277 would make useless
    with umask(mask):
        text = read(path, may_create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(text)) == 32
    assert list(path.parent.iterdir()) == [path]


def test_folders_that_it_makes_are_its_owners_alone(tmp_path: Path) -> None:
    with umask(0o000):
        read(tmp_path / "a" / "b" / "cluster.secret", may_create=True)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]


def test_the_next_serve_finds_the_same(tmp_path: Path) -> None:
    path = tmp_path / "cluster.secret"
    assert read(path, may_create=True) == read(path, may_create=True) == read(path)
    assert read(tmp_path / "another", may_create=True) != read(path)


def race(folder: Path, name: str, barrier: Barrier) -> None:
    texts = []
    for number in range(NUM_RACES):
        barrier.wait(60)
        texts.append(read(folder / str(number) / "cluster.secret", may_create=True))
    (folder / name).write_text("\n".join(texts))


@pytest.mark.slow
def test_two_processes_that_race_get_the_same_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=race, args=(tmp_path, name, barrier)) for name in ("one", "two")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    one, two = [(tmp_path / name).read_text().splitlines() for name in ("one", "two")]
    assert one == two
    assert len(set(one)) == NUM_RACES


def test_only_serve_creates_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/cluster\.secret does not exist; copy it"):
        read(tmp_path / "cluster.secret")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{file} has mode {mode:04o}.*chmod 600 {file}") as caught:
        read(file)
    assert TEXT not in str(caught.value)


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(
        ConfigError, match=rf"{file} \(mode 0600\) belongs to user {me}, but this process runs as {me + 1}"
    ):
        read(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"fifteen letters\n"])
def test_an_empty_or_short_file_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"network\.secret_file {file}: .*at least 16 characters"):
        read(file, may_create=True)
    assert file.read_bytes() == content


def test_a_file_that_cannot_be_the_secret_is_refused(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="holds more than 4096 bytes"):
        read(file)
    with pytest.raises(ConfigError, match=rf"cannot use {tmp_path}: Is a directory"):
        read(tmp_path)


def test_a_place_where_no_file_can_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot use /dev/null/cluster\.secret: Not a directory"):
        read(Path("/dev/null/cluster.secret"), may_create=True)


def test_the_environment_wins_and_makes_no_file(tmp_path: Path) -> None:
    network = NetworkConfig(secret_file=str(tmp_path / "none"))
    secret = load_secret(network, {SECRET_VARIABLE: f" {TEXT}\n"}, may_create=True)
    assert secret is not None
    assert secret.text == TEXT
    assert list(tmp_path.iterdir()) == []


def test_a_files_content_in_the_environment_is_the_same_secret(tmp_path: Path) -> None:
    text = read(tmp_path / "secret", may_create=True)
    content = (tmp_path / "secret").read_text()
    assert load_secret(NetworkConfig(), {SECRET_VARIABLE: content}, may_create=False) is not None
    assert content.strip() == text


@pytest.mark.parametrize("text", ["", "fifteen letters"])
def test_a_short_secret_in_the_environment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"BATON_CLUSTER_SECRET: .*at least 16 characters") as caught:
        load_secret(NetworkConfig(), {SECRET_VARIABLE: text}, may_create=True)
    assert "fifteen" not in str(caught.value)


def test_without_security_there_is_no_secret() -> None:
    assert load_secret(NetworkConfig(security="none"), {}, may_create=True) is None


def test_the_default_place_is_the_users_configuration(tmp_path: Path) -> None:
    assert default_secret_path({}) == Path.home() / ".config/baton/cluster.secret"
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert default_secret_path(environment) == tmp_path / "baton/cluster.secret"
    secret = load_secret(NetworkConfig(), environment, may_create=True)
    assert secret is not None
    assert secret.text == (tmp_path / "baton/cluster.secret").read_text().strip()


def test_a_pipe_without_a_writer_is_an_empty_file_and_one_with_a_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=r"a cluster secret needs at least 16 characters, this one has 0"):
        read(path)
    reading_end, writing_end = os.pipe()
    os.write(writing_end, TEXT.encode())
    os.close(writing_end)
    assert read(Path(f"/dev/fd/{reading_end}")) == TEXT
    os.close(reading_end)
