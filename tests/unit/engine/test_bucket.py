"""Folders of object stores, by fsspec's own file system in memory."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from baton.errors import ModelError
from engine.loading import bucket
from engine.loading.bucket import fetch
from engine.loading.pretrained import folder_here, resolve

REGISTRY = sys.modules["fsspec.registry"]  # fsspec has another object of this name
URL = "s3://bucket/models/tiny"


class InMemory(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """Answers for s3:// as s3fs would."""

    protocol = "s3"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file  # each reader has a position of its own

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        """Lists as s3fs does, which leaves out folders that it cannot list, unless told otherwise."""
        return AbstractFileSystem.find(self, path, *args, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("s3:/")))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Any]:
    """A bucket with the tiny model, and with files that do not belong to the model."""
    monkeypatch.setitem(REGISTRY._registry, "s3", InMemory)
    files = fsspec.filesystem("s3")
    for path in folder.iterdir():
        files.pipe(f"/bucket/models/tiny/{path.name}", path.read_bytes())
    files.pipe("/bucket/models/tiny/pytorch_model.bin", b"pickle")
    files.pipe("/bucket/models/tiny/onnx/config.json", b"{}")
    yield files
    InMemory.store.clear()


def fetched(cache: Path, **options: bool) -> Path:
    return fetch(URL, cache, lambda *_: None, **options)


def test_a_folder_becomes_one_of_the_cache(store: Any, tmp_path: Path, folder: Path) -> None:
    said: list[tuple[str, float]] = []
    path = fetch(URL, tmp_path, lambda *report: said.append(report))
    assert path.name == "tiny"
    assert {file.name for file in path.iterdir()} == {file.name for file in folder.iterdir()}
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert said[-1][0].startswith(f"downloading {URL}: 1 of 1 MB")
    assert said[-1][1] == 1.0
    assert resolve(URL, tmp_path) == path
    assert folder_here(URL, folder, tmp_path) == path, "each machine downloads its own"


def test_a_gateway_takes_no_weights_and_a_worker_then_the_rest(store: Any, tmp_path: Path) -> None:
    path = fetched(tmp_path, weights=False)
    assert not (path / "model.safetensors").exists()
    assert (path / "tokenizer.json").exists()
    assert fetched(tmp_path) == path
    assert (path / "model.safetensors").exists()


def test_further_chat_templates_come_too(store: Any, tmp_path: Path) -> None:
    before = fetched(tmp_path)
    template = "additional_chat_templates/tool_use.jinja"
    store.pipe(f"/bucket/models/tiny/{template}", b"{{ tools }}")
    path = fetched(tmp_path, weights=False)
    assert (path / template).read_text() == "{{ tools }}"
    assert path != before, "a folder with another template is another model"


def test_what_an_earlier_process_left_is_continued(store: Any, tmp_path: Path, folder: Path) -> None:
    path = fetched(tmp_path, weights=False)
    weights = (folder / "model.safetensors").read_bytes()
    (path / ".model.safetensors.partial").write_bytes(b"\0" * 1000 + weights[1000:5000])
    fetched(tmp_path)
    assert (path / "model.safetensors").read_bytes() == b"\0" * 1000 + weights[1000:], "no byte twice"


def test_without_locks_two_hosts_do_not_write_to_one_file(
    store: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host begins while the first is in the middle of the weights."""

    @contextmanager
    def no_locks(path: Path, _on_wait: object) -> Iterator[bool]:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield False

    monkeypatch.setattr(bucket, "exclusive", no_locks)
    monkeypatch.setattr(bucket, "CHUNK_BYTES", 100_000)
    paths: list[Path] = []

    def begin_second(text: str, part: float) -> None:
        if not paths and 0 < part < 1:
            paths.append(fetched(tmp_path))

    assert [fetch(URL, tmp_path, begin_second)] == paths
    assert {file.name for file in paths[0].iterdir()} == {file.name for file in folder.iterdir()}
    assert (paths[0] / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_copy_of_another_size_is_not_used(
    store: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process appends to the partial file, as older versions did on volumes without locks."""
    path = fetched(tmp_path, weights=False)
    partial, size = path / ".model.safetensors.partial", (folder / "model.safetensors").stat().st_size

    def append(_text: str, part: float) -> None:
        if part == 1:
            with partial.open("ab") as content:
                content.write(b"more")

    with pytest.raises(ModelError, match=rf"has {size + 4:,} bytes, expected {size:,}; the copy was removed"):
        fetch(URL, tmp_path, append)
    assert not partial.exists()
    (path / "model.safetensors").write_bytes(b"what such a version left")
    assert (fetched(tmp_path) / "model.safetensors").stat().st_size == size


def test_another_file_in_its_place_is_another_folder(store: Any, tmp_path: Path) -> None:
    before = fetched(tmp_path)
    store.pipe("/bucket/models/tiny/config.json", b'{"another": 1}')
    after = fetched(tmp_path)
    assert after != before
    assert (after / "config.json").read_bytes() == b'{"another": 1}'


@pytest.mark.parametrize(("url", "package"), [("s3://b/m", "s3fs"), ("gs://b/m", "gcsfs")])
def test_without_its_package_a_store_is_refused_by_name(
    url: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY.known_implementations, url[:2], {"class": "no_such_package.X", "err": "no"})
    monkeypatch.delitem(REGISTRY._registry, url[:2], raising=False)
    with pytest.raises(
        ModelError, match=rf"'{url}' needs the package {package}: pip install 'baton\[{url[:2]}\]'"
    ):
        resolve(url, tmp_path)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("ftp://example.com/model", ""),
        (
            "https://huggingface.co/acme/tiny/tree/main",
            "; for a model of the Hugging Face Hub, write 'acme/tiny'",
        ),
    ],
)
def test_another_scheme_is_refused_by_name(url: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"p.?:// is not supported; supported are s3:// and gs://{remedy}$"):
        resolve(url, tmp_path)


def test_an_empty_folder_and_an_error_of_the_store_are_said(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="s3://bucket/nothing holds no file"):
        resolve("s3://bucket/nothing", tmp_path)

    def refuse(_store: object, path: str, **_: object) -> None:
        raise PermissionError(f"Access Denied: {path}")

    monkeypatch.setattr(type(store), "ls", refuse)
    with pytest.raises(ModelError, match=f"cannot copy {URL} to {tmp_path}: PermissionError: Access Denied"):
        resolve(URL, tmp_path)


def test_a_folder_of_templates_that_cannot_be_listed_is_not_left_out(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without these templates would have another model."""
    ls = type(store).ls

    def fail_below(files: Any, path: str, **options: Any) -> Any:
        if path.endswith("additional_chat_templates"):
            raise OSError("Please reduce your request rate")
        return ls(files, path, **options)

    monkeypatch.setattr(type(store), "ls", fail_below)
    with pytest.raises(ModelError, match=f"cannot copy {URL} to {tmp_path}: OSError: Please reduce"):
        resolve(URL, tmp_path)


def test_one_of_several_gguf_files_is_named_by_its_url(store: Any, tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "a-q4_0.gguf", "a-q8_0.gguf"):
        store.pipe(f"/bucket/quantized/{name}", b"GGUF")
    with pytest.raises(ModelError, match="has several GGUF files") as refused:
        fetch("s3://bucket/quantized/", tmp_path, lambda *_: None)
    (url,) = re.findall("such as ([^ ]+)[.] There", str(refused.value))
    assert fetch(url, tmp_path, lambda *_: None).name == "a-q4_0.gguf"


def test_every_scheme_has_an_extra_of_its_name() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {scheme: extras[scheme][0].partition(">")[0] for scheme in bucket.EXTRAS} == bucket.EXTRAS
