"""Downloads of files whose answers have another size than the file, and caches that are not whole."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from baton.errors import ModelError
from baton.hub_name import HubName
from engine.loading import hub_download
from engine.loading.hub import fetch
from engine.loading.hub_download import LargeFile
from engine.loading.hub_errors import explained
from tests.factories.stub_hub import Repository, StubHub, stub_hub, use_in_this_process


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr(hub_download, "FIRST_PAUSE_S", 0.01)
    with stub_hub() as hub:
        use_in_this_process(hub, tmp_path / "hf", monkeypatch)
        yield hub


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize("size_error", [-10, 10])
def test_whole_answers_of_another_size_are_given_up(
    hub: StubHub, folder: Path, tmp_path: Path, knows_ranges: bool, size_error: int
) -> None:
    """With ranges, the answers after the first are whole and empty, or begin again."""
    hub.add_folder("acme/tiny", folder)
    hub.knows_ranges = knows_ranges
    weights = (folder / "model.safetensors").read_bytes()
    sha, listed = hashlib.sha256(weights).hexdigest(), len(weights) + size_error
    file = LargeFile(f"{hub.content_endpoint}/{sha}", listed, sha)
    tries: list[str] = []
    most = 2 * hub_download.MAX_FRUITLESS

    def count(_position: int) -> None:
        tries[:] = [request for request in hub.requests if "content" in request]
        assert len(tries) <= most, "for ever"

    with pytest.raises(ModelError) as error:
        hub_download.download(file, tmp_path, count, threading.Event())
    assert f"{sha} has {listed:,} bytes, but {len(weights):,} came, and 5 tries" in str(error.value)
    assert len(tries) == hub_download.MAX_FRUITLESS + (size_error > 0)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_cache_without_a_list_of_files_that_is_not_whole_is_said_to_be_so(
    hub: StubHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_indexed: bool
) -> None:
    """Some versions of huggingface_hub keep no list."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    if is_indexed:
        weights = files.pop("model.safetensors")
        files |= {"a.safetensors": weights, "b.safetensors": weights[::-1]}
        files["model.safetensors.index.json"] = (
            b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
        )
    hub.repositories["acme/tiny"] = Repository()
    hub.repositories["acme/tiny"].commit(files)
    name = HubName("acme/tiny")
    fetch(name, lambda *_: None)
    shutil.copytree(tmp_path / "hf", tmp_path / "copy", symlinks=True)  # this process remembers lists by path
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "copy" / "hub"))
    (cached,) = (tmp_path / "copy").glob("hub/models--*/snapshots/*")
    shutil.rmtree(cached.parent.parent / "trees")
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch(name, lambda *_: None) == cached
        (cached / ("b.safetensors" if is_indexed else "model.safetensors")).unlink()
        with pytest.raises(ModelError, match="does not have the whole model"):
            fetch(name, lambda *_: None)
    assert fetch(name, lambda *_: None) == cached
    assert (cached / ("b.safetensors" if is_indexed else "model.safetensors")).is_file()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_used_says_how_to_serve_what_it_has(number: int) -> None:
    """A shared cache is often mounted read-only, and the name's branch may have a new commit."""
    with pytest.raises(ModelError) as refused, explained(HubName("acme/tiny")):
        raise OSError(number, os.strerror(number), f"{constants.HF_HUB_CACHE}/snapshots/0")
    assert f"cannot be used for acme/tiny ({os.strerror(number)}: " in str(refused.value)
    assert "if the cache has an earlier commit, HF_HUB_OFFLINE=1 to serve it" in str(refused.value)


@pytest.mark.parametrize("path", ["/home/somebody/.cache/huggingface/token", None])
def test_a_file_elsewhere_that_cannot_be_read_says_nothing_of_the_cache(path: str | None) -> None:
    with pytest.raises(ModelError) as refused, explained(HubName("acme/tiny")):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    assert "cannot prepare acme/tiny" in str(refused.value)
    assert "HF_HUB_OFFLINE" not in str(refused.value)
