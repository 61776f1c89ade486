"""A folder's commit: part of its digest and of the name by which all machines load it."""

from pathlib import Path

import pytest

from baton.config import BatonConfig
from engine.loading.commit import commit_of, source_of, with_commit
from engine.loading.digest import model_digest

COMMIT, OTHER = "a" * 40, "b" * 40


def snapshot(home: Path, folder: Path, commit: str = COMMIT) -> Path:
    """The folder as the Hub's cache holds it."""
    place = home / "models--a--b" / "snapshots" / commit
    place.mkdir(parents=True)
    for file in folder.iterdir():
        (place / file.name).symlink_to(file)
    return place


def test_a_folder_of_the_hubs_cache_has_a_commit_and_others_have_none(tmp_path: Path, folder: Path) -> None:
    assert commit_of(snapshot(tmp_path, folder)) == COMMIT
    assert commit_of(folder) is None
    gguf = tmp_path / "described"
    gguf.mkdir()
    (gguf / "model.gguf").symlink_to(tmp_path / "models--a--b" / "snapshots" / OTHER / "sub" / "m.gguf")
    assert commit_of(gguf) == OTHER
    assert source_of(gguf) == tmp_path / "models--a--b" / "snapshots" / OTHER / "sub" / "m.gguf"
    assert source_of(folder) == folder
    (gguf / "model.gguf").unlink()
    (gguf / "model.gguf").touch()
    assert source_of(gguf) == gguf, "a copy without links does not say where it is from"


def test_the_digest_names_the_commit(tmp_path: Path, folder: Path) -> None:
    one, two = snapshot(tmp_path / "x", folder), snapshot(tmp_path / "y", folder)
    other = snapshot(tmp_path / "z", folder, OTHER)
    assert model_digest(one) == model_digest(two)
    assert {model_digest(one), model_digest(other)}.isdisjoint({model_digest(folder)})
    assert model_digest(one) != model_digest(other)
    assert model_digest(one).endswith(COMMIT)


def test_the_digest_names_the_version_of_a_copy_from_an_object_store(tmp_path: Path, folder: Path) -> None:
    copies = []
    for host, version in (("x", "a" * 16), ("y", "a" * 16), ("x", "b" * 16)):
        copies.append(tmp_path / host / "buckets" / version / "tiny")
        copies[-1].mkdir(parents=True)
        for file in folder.iterdir():
            (copies[-1] / file.name).symlink_to(file)
    one, same, other = map(model_digest, copies)
    assert one == same != other
    assert one == f"{model_digest(folder)}-{'a' * 16}"
    assert commit_of(copies[0]) is None


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("a/b", f"a/b@{COMMIT}"),
        ("a/b@main", f"a/b@{COMMIT}"),
        (f"a/b@{COMMIT}:Q8_0", f"a/b@{COMMIT}:Q8_0"),
        ("smollm2", "smollm2"),
        ("/models/b", "/models/b"),
    ],
)
def test_a_name_gets_the_commit_of_its_folder(tmp_path: Path, folder: Path, asked: str, name: str) -> None:
    config = BatonConfig.from_mapping({"model": {"path": asked}, "cluster": {"decode": 3}})
    pinned = with_commit(config, snapshot(tmp_path, folder))
    assert pinned.model.path == name
    assert pinned.cluster == config.cluster


def test_a_relative_folder_that_could_be_a_name_gets_its_whole_path() -> None:
    config = BatonConfig.from_mapping({"model": {"path": "models/b"}})
    assert with_commit(config, Path("/home/me/models/b")).model.path == "/home/me/models/b"
