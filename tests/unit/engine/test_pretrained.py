"""Named models and GGUF files: what the cache promises, with a fake wheel and a fake description."""

import hashlib
import json
import os
import stat
import threading
import zipfile
from pathlib import Path

import pytest

from baton.errors import ModelError
from engine.loading import pretrained
from engine.loading.gguf_folder import LAYOUT
from engine.loading.model_files import Progress, weight_files
from engine.loading.pretrained import PretrainedModel, default_cache_dir, folder_here, is_cached, resolve

GGUF_BYTES = b"GGUF" + bytes(range(256))
CONFIG = {"model_type": "llama", "hidden_size": 8}


class FakeSource:
    """A package index with one wheel, and a description of its GGUF file."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", GGUF_BYTES)
        self.num_fetched = 0
        self.num_described = 0
        self.config: dict[str, object] = dict(CONFIG)

    @property
    def model(self) -> PretrainedModel:
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        return PretrainedModel("tiny==1.0", digest, "tiny/model.gguf", CONFIG)

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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "config.json").chmod(0o600)

    def resolve(self, cache: Path, name: str = "tiny") -> Path:
        return resolve(name, cache, fetch=self.fetch, describe=self.describe)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource(tmp_path)
    monkeypatch.setitem(pretrained.PRETRAINED, "tiny", fake.model)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_makes_the_folder_once(source: FakeSource, cache: Path) -> None:
    assert not is_cached("tiny", cache)
    folder = source.resolve(cache)
    assert folder == cache / f"tiny-{LAYOUT}"
    assert (folder / "model.gguf").read_bytes() == GGUF_BYTES
    assert is_cached("tiny", cache)
    assert source.resolve(cache) == folder
    assert (source.num_fetched, source.num_described) == (1, 1)


def test_reports_progress(source: FakeSource, cache: Path) -> None:
    seen: list[tuple[str, float]] = []
    resolve("tiny", cache, lambda *news: seen.append(news), fetch=source.fetch, describe=source.describe)
    assert seen == [("downloading tiny==1.0", 1.0)]


def test_everyone_may_read_the_files(source: FakeSource, cache: Path) -> None:
    folder = source.resolve(cache)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_the_manifest_lists_every_file_with_its_digest(source: FakeSource, cache: Path) -> None:
    folder = source.resolve(cache)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == "tiny==1.0"
    assert manifest["files"]["model.gguf"] == {
        "size_bytes": len(GGUF_BYTES),
        "sha256": hashlib.sha256(GGUF_BYTES).hexdigest(),
    }
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}


def test_a_wrong_digest_is_refused_and_leaves_nothing(source: FakeSource, cache: Path) -> None:
    source.wheel.write_bytes(source.wheel.read_bytes() + b"tampered")
    with pytest.raises(ModelError, match=r"sha256 .* expected .*--model DIR"):
        source.resolve(cache)
    assert source.num_described == 0
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_a_model_of_another_shape_is_refused(source: FakeSource, cache: Path) -> None:
    source.config["hidden_size"] = 9
    with pytest.raises(ModelError, match="hidden_size = 9, expected 8"):
        source.resolve(cache)
    assert not is_cached("tiny", cache)


def test_an_interrupted_run_leaves_no_folder_and_its_rest_is_swept(source: FakeSource, cache: Path) -> None:
    (cache / ".tiny.partialdead").mkdir(parents=True)  # what kill -9 leaves behind
    (cache / ".tiny.partialdead" / "model.gguf").write_bytes(b"half")

    def interrupted(_gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", cache, fetch=source.fetch, describe=interrupted)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]
    assert source.resolve(cache).is_dir()


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "other source", "former layout", "manifest is no JSON"]
)
def test_a_damaged_folder_is_made_anew(source: FakeSource, cache: Path, damage: str) -> None:
    folder = source.resolve(cache)
    manifest = folder / "manifest.json"
    if damage == "truncated":
        (folder / "model.gguf").write_bytes(b"GG")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "other source":
        manifest.write_text(manifest.read_text().replace(source.model.wheel_sha256, "0" * 64))
    elif damage == "former layout":
        manifest.write_text(manifest.read_text().replace('"layout": ', '"layout": 1000'))
    else:
        manifest.write_text("{")
    assert source.resolve(cache) == folder
    assert (folder / "model.gguf").read_bytes() == GGUF_BYTES
    assert source.num_described == 2


def make_older(cache: Path, source: FakeSource, weights: str, content: bytes) -> Path:
    """The folder of another version of Baton, before folders had the layout in their names."""
    folder = cache / "tiny"
    folder.mkdir(parents=True)
    (folder / weights).write_bytes(content)
    (folder / "config.json").write_text("{}")
    digest = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"source_sha256": source.model.wheel_sha256, "layout": LAYOUT - 1, "files": {weights: digest}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("can_link", [True, False])
def test_another_versions_gguf_file_is_shared_and_its_folder_stays(
    source: FakeSource, cache: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    if not can_link:

        def refuse(*_: object) -> None:
            raise OSError("another file system")

        monkeypatch.setattr(os, "link", refuse)
    older = make_older(cache, source, "model.gguf", GGUF_BYTES)
    before = {path: path.read_bytes() for path in older.iterdir()}
    folder = source.resolve(cache)
    assert folder != older
    assert (source.num_fetched, source.num_described) == (0, 1)
    assert (folder / "model.gguf").read_bytes() == GGUF_BYTES
    assert (folder / "model.gguf").samefile(older / "model.gguf") == can_link
    assert {path: path.read_bytes() for path in older.iterdir()} == before


def test_another_versions_gguf_file_is_not_trusted_if_it_changed(source: FakeSource, cache: Path) -> None:
    older = make_older(cache, source, "model.gguf", GGUF_BYTES)
    (older / "model.gguf").write_bytes(GGUF_BYTES[::-1])
    assert (source.resolve(cache) / "model.gguf").read_bytes() == GGUF_BYTES
    assert source.num_fetched == 1


def test_safetensors_of_an_earlier_version_stay_and_are_named_if_the_download_fails(
    source: FakeSource, cache: Path
) -> None:
    older = make_older(cache, source, "model.safetensors", b"converted")

    def offline(*_: object) -> Path:
        raise ModelError("no network")

    with pytest.raises(ModelError, match=rf"no network; .*--model {older}$"):
        resolve("tiny", cache, fetch=offline, describe=source.describe)
    assert resolve(str(older), cache) == older
    source.resolve(cache)
    assert (older / "model.safetensors").read_bytes() == b"converted"


def test_two_at_once_make_it_once(source: FakeSource, cache: Path) -> None:
    first_describes, may_finish = threading.Event(), threading.Event()

    def slow(gguf: Path, folder: Path) -> None:
        first_describes.set()
        assert may_finish.wait(60)
        source.describe(gguf, folder)

    folders: list[Path] = []
    first = threading.Thread(
        target=lambda: folders.append(resolve("tiny", cache, fetch=source.fetch, describe=slow))
    )
    second = threading.Thread(target=lambda: folders.append(source.resolve(cache)))
    first.start()
    assert first_describes.wait(60)
    second.start()
    may_finish.set()
    first.join(60)
    second.join(60)
    assert folders == [cache / f"tiny-{LAYOUT}"] * 2
    assert source.num_described == 1


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


def test_two_at_once_agree_on_a_gguf_files_folder(source: FakeSource, cache: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(GGUF_BYTES)

    def other_is_first(gguf: Path, folder: Path) -> None:
        source.resolve(cache, str(gguf))
        source.describe(gguf, folder)

    folder = resolve(str(gguf), cache, describe=other_is_first)
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


def test_the_page_on_ray_has_the_error_of_a_host_without_the_model(tmp_path: Path) -> None:
    path = "/srv/models/model"
    with pytest.raises(ModelError) as caught:
        folder_here(path, Path(path), tmp_path)
    page = Path(__file__).parents[3] / "docs" / "ray.md"
    assert f"| `{str(caught.value).partition(';')[0]}`, from " in page.read_text()


def test_the_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert default_cache_dir({}) == Path("/home/me/.cache/baton")
    assert default_cache_dir({"XDG_CACHE_HOME": ""}) == Path("/home/me/.cache/baton")
