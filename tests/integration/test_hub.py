"""Models by their Hub names, against a stub Hub on loopback: what is downloaded, and what is said when it cannot be."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from baton.errors import ModelError
from baton.hub_name import HubName
from engine.loading import hub_download
from engine.loading.commit import commit_of
from engine.loading.digest import model_digest
from engine.loading.hub import fetch
from engine.loading.pretrained import folder_here, resolve
from tests.factories.gguf_files import make_gguf
from tests.factories.stub_hub import TOKEN, Repository, StubHub, environment_of, stub_hub, use_in_this_process

NAME = "acme/tiny"


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub() as hub:
        yield hub


@pytest.fixture
def home(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME of this process, which uses the stub."""
    monkeypatch.setattr(hub_download, "FIRST_PAUSE_S", 0.01)
    use_in_this_process(hub, tmp_path / "hf", monkeypatch)
    return tmp_path / "hf"


def fetched(name: str = NAME, *, weights: bool = True) -> Path:
    parsed = HubName.parse(name)
    assert parsed is not None
    return fetch(parsed, lambda *_: None, weights=weights)


def refused(name: str = NAME) -> str:
    with pytest.raises(ModelError) as error:
        fetched(name)
    return str(error.value)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_only_the_files_that_are_needed_come_and_no_token_leaves_the_hub(
    hub: StubHub, home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    others = {
        "README__md": b"#",
        "pytorch_model__bin": b"x",
        "consolidated__safetensors": b"y",
        "m__onnx": b"z",
    }
    commit = hub.add_folder(NAME, folder, **others)
    path = resolve(NAME, tmp_path)
    assert {file.name for file in path.iterdir()} == {file.name for file in folder.iterdir()}
    assert all((path / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir())
    assert path == home / "hub" / "models--acme--tiny" / "snapshots" / commit
    assert commit_of(path) == commit
    assert hub.content_bytes == (folder / "model.safetensors").stat().st_size
    assert hub.tokens_leaked == 0


def test_a_commit_that_is_there_needs_no_network_and_another_name_asks_once(
    hub: StubHub, home: Path, folder: Path
) -> None:
    old = hub.add_folder(NAME, folder)
    path = fetched()
    hub.requests.clear()
    assert fetched(f"{NAME}@{old}") == path
    assert hub.requests == []
    assert fetched() == path
    assert hub.requests == ["GET /api/models/acme/tiny/revision/main"]
    new = hub.add_folder(NAME, folder, extra__json=b"{}")
    assert (commit_of(fetched()), commit_of(fetched(f"{NAME}@{old}"))) == (new, old)
    assert hub.content_bytes == (folder / "model.safetensors").stat().st_size, "equal files come once"


def test_a_tag_is_a_revision(hub: StubHub, home: Path, folder: Path) -> None:
    tagged = hub.add_folder(NAME, folder)
    hub.repositories[NAME].refs["v1"] = tagged
    hub.add_folder(NAME, folder, extra__json=b"{}")
    assert commit_of(fetched(f"{NAME}@v1")) == tagged


def test_a_gateway_gets_no_weights_and_a_worker_on_its_machine_then_the_rest(
    hub: StubHub, home: Path, folder: Path, tmp_path: Path
) -> None:
    commit = hub.add_folder(NAME, folder)
    path = fetched(weights=False)
    assert not (path / "model.safetensors").exists()
    assert hub.content_bytes == 0
    assert folder_here(f"{NAME}@{commit}", path, tmp_path) == path
    assert (path / "model.safetensors").is_file()


def test_several_safetensors_files_come_by_their_index(hub: StubHub, home: Path, folder: Path) -> None:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    weights = files.pop("model.safetensors")
    index = b'{"weight_map": {"x": "part-1.safetensors", "y": "part-2.safetensors"}}'
    parts = {"part-1.safetensors": weights, "part-2.safetensors": weights[::-1], "part-3.safetensors": b"no"}
    hub.repositories[NAME], files["model.safetensors.index.json"] = Repository(), index
    for more, names in ((parts, list(parts)[:2]), ({"model.safetensors": weights}, ["model.safetensors"])):
        hub.repositories[NAME].commit(files | more)
        assert sorted(file.name for file in fetched().glob("*.safetensors")) == names
    hub.repositories[NAME].commit(files)
    assert "the index of acme/tiny names 'part-1.safetensors', which" in refused()


def test_a_name_that_the_hub_does_not_know_says_what_to_check(
    hub: StubHub, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        resolve("acme/tinny", tmp_path)
    said = f"model 'acme/tinny' is not a folder or file here, and {hub.endpoint} has no public model"
    assert str(error.value).startswith(said)
    assert "HF_TOKEN" in str(error.value)


@pytest.mark.parametrize("name", ["acme/a--b", "acme/tiny.git", "acme/a..b"])
def test_what_cannot_be_a_name_is_refused_without_asking(hub: StubHub, home: Path, name: str) -> None:
    assert refused(name).startswith(f"model '{name}' is not a folder or file here, and not a valid name")
    assert hub.requests == []


def test_an_endpoint_that_is_no_hub_is_named(
    hub: StubHub, home: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add_folder(NAME, folder)
    fetched()
    for number, hub.page in enumerate((b"<html>Log in</html>", b"{}", b"[]", b'{"id": "acme/other"}'), 1):
        assert refused("acme/other").startswith(f"{hub.endpoint} did not answer like a Hub (")
        assert (commit_of(fetched()), caplog.text.count(f"last known commit, {commit}")) == (commit, number)


def test_a_wrong_revision_is_named(hub: StubHub, home: Path, folder: Path) -> None:
    hub.add_folder(NAME, folder)
    assert refused(f"{NAME}@v9").startswith(
        "acme/tiny has no revision 'v9': use a branch, a tag or a whole commit of"
    )
    assert refused(f"{NAME}@{'0' * 40}").startswith(f"acme/tiny has no revision '{'0' * 40}'")


def test_a_gated_model_says_where_to_accept_its_conditions(
    hub: StubHub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder(NAME, folder)
    hub.repositories[NAME].is_gated = True
    assert refused().startswith(
        f"acme/tiny is gated: accept its conditions at {hub.endpoint}/acme/tiny, and set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "is gated, and the account of HF_TOKEN has no access" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched() / "model.safetensors").is_file()


def test_offline_serves_what_is_cached_and_says_what_is_not(
    hub: StubHub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder(NAME, folder)
    path = fetched()
    hub.add_folder("acme/half", folder)
    fetched("acme/half", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetched() == path
    for name in ("acme/other", "acme/half"):
        assert "does not have the whole model" in refused(name)
        assert "HF_HUB_OFFLINE forbids downloads. Unset HF_HUB_OFFLINE, or copy" in refused(name)
    assert hub.requests == []


@pytest.mark.parametrize("trouble", ["down", "unreachable"])
def test_a_hub_that_does_not_answer_is_no_matter_for_what_is_cached(
    hub: StubHub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    hub.add_folder(NAME, folder)
    path = fetched()
    hub.is_down = trouble == "down"
    if trouble == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetched() == path
    said = refused("acme/other")
    assert said.startswith(f"cannot reach {constants.ENDPOINT} (")
    assert "model 'acme/other' is not a folder here, and the cache" in said
    assert "HTTPS_PROXY" in said


def test_broken_connections_are_continued_without_a_byte_twice(
    hub: StubHub, home: Path, folder: Path
) -> None:
    hub.add_folder(NAME, folder)
    weights = (folder / "model.safetensors").read_bytes()
    hub.breaks_after = [100_000, 0, 0, 50_000]
    assert (fetched() / "model.safetensors").read_bytes() == weights
    assert hub.content_bytes == len(weights)
    content = [request for request in hub.requests if "content" in request]
    assert content[0] == "GET content from 0"
    assert content[1:4] == ["GET content from 100000"] * 3
    assert content[4] == "GET content from 150000"


def test_a_connection_that_brings_nothing_is_given_up_and_continued_by_the_next_start(
    hub: StubHub, home: Path, folder: Path
) -> None:
    hub.add_folder(NAME, folder)
    hub.breaks_after = [100_000, *[0] * hub_download.MAX_FRUITLESS]
    said = refused()
    assert said.startswith(f"cannot reach {hub.endpoint} (")
    assert said.endswith("What was downloaded is kept; the next start continues the download")
    assert (fetched() / "model.safetensors").is_file()
    assert hub.content_bytes == (folder / "model.safetensors").stat().st_size


def test_a_server_without_ranges_sends_all_of_it_again(hub: StubHub, home: Path, folder: Path) -> None:
    hub.add_folder(NAME, folder)
    hub.knows_ranges = False
    hub.breaks_after = [100_000]
    weights = (folder / "model.safetensors").read_bytes()
    assert (fetched() / "model.safetensors").read_bytes() == weights
    assert hub.content_bytes == len(weights) + 100_000


def test_other_content_is_refused_and_not_kept(hub: StubHub, home: Path, folder: Path) -> None:
    hub.add_folder(NAME, folder)
    hub.damage = b"damaged"
    said = refused()
    assert f"expected {sha256_of((folder / 'model.safetensors').read_bytes())}; the download" in said
    hub.damage = b""
    assert (fetched() / "model.safetensors").is_file()


def test_a_full_disk_is_said_and_what_came_stays(hub: StubHub, home: Path, folder: Path) -> None:
    hub.add_folder(NAME, folder)
    weights = (folder / "model.safetensors").read_bytes()
    blobs = fetched(weights=False).parent.parent / "blobs"
    partial = blobs / f"{sha256_of(weights)}.incomplete"
    partial.symlink_to("/dev/full")  # the kernel has no room there
    assert refused().startswith(
        f"the disk of {home / 'hub'} became full during the download of acme/tiny; free some room, or"
    )
    assert partial.is_symlink()
    partial.unlink()
    partial.write_bytes(weights[:5000])
    fetched()
    assert hub.requests[-2] == "GET content from 5000"


def test_too_little_room_is_said_with_the_numbers_before_a_byte_comes(
    hub: StubHub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder(NAME, folder)
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": size - 1})())
    assert (
        f"acme/tiny needs {size / 1000:.1f} kB more in {home / 'hub'}, where {(size - 1) / 1000:.1f} kB are free"
        in refused()
    )
    assert hub.content_bytes == 0


def test_two_at_once_download_once_and_the_second_says_that_it_waits(
    hub: StubHub, home: Path, folder: Path
) -> None:
    hub.add_folder(NAME, folder)
    hub.holds_after = 100_000
    name = HubName(NAME)
    paths, waits = [], threading.Event()

    def second(text: str, _fraction: float) -> None:
        if text == "waiting for another process that downloads acme/tiny":
            waits.set()

    threads = [threading.Thread(target=lambda: paths.append(fetch(name, lambda *_: None)))]
    threads[0].start()
    assert hub.is_held.wait(60)
    threads.append(threading.Thread(target=lambda: paths.append(fetch(name, second))))
    threads[1].start()
    assert waits.wait(60)
    hub.go_on.set()
    for thread in threads:
        thread.join(60)
    assert paths[0] == paths[1]
    assert hub.content_bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_a_download_that_was_killed_is_continued_by_the_next_process(
    hub: StubHub, home: Path, folder: Path, tmp_path: Path
) -> None:
    hub.add_folder(NAME, folder)
    weights = (folder / "model.safetensors").read_bytes()
    hub.holds_after = 200_000
    program = (
        "from baton.hub_name import HubName; from engine.loading.hub import fetch; "
        f"print(fetch(HubName({NAME!r}), print))"
    )
    environment = os.environ | environment_of(hub, tmp_path / "other")
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        assert hub.is_held.wait(60)
        deadline = time.monotonic() + 60
        while sum(file.stat().st_size for file in (tmp_path / "other").rglob("*.incomplete")) < 200_000:
            assert time.monotonic() < deadline, "what the Hub has sent is written"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    hub.go_on.set()
    (partial,) = (tmp_path / "other").rglob("*.incomplete")
    there = partial.stat().st_size
    hub.requests.clear()
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    path = Path(done.stdout.splitlines()[-1])
    assert (path / "model.safetensors").read_bytes() == weights
    assert [request for request in hub.requests if "content" in request] == [f"GET content from {there}"]
    assert list((tmp_path / "other").rglob("*.incomplete")) == []


def test_progress_is_said_in_bytes(hub: StubHub, home: Path, folder: Path) -> None:
    hub.add_folder(NAME, folder)
    size = (folder / "model.safetensors").stat().st_size
    said: list[tuple[str, float]] = []
    fetch(HubName(NAME), lambda *report: said.append(report))
    text = f"{size / 1000:.1f} kB"
    assert said[0] == (f"downloading acme/tiny: 0.0 kB of {text}", 0.0)
    assert said[-1] == (f"downloading acme/tiny: {text} of {text}", 1.0)


def test_a_gguf_repository_serves_the_file_that_is_named(
    hub: StubHub, home: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {
        f"tiny-{kind}.gguf": make_gguf(tmp_path / f"{kind}.gguf", folder, kind).read_bytes()
        for kind in ("Q8_0", "F16")
    }
    hub.repositories[NAME] = Repository()
    commit = hub.repositories[NAME].commit(files | {"mmproj-F16.gguf": b"eyes"})
    assert "acme/tiny has several GGUF files; name one, such as acme/tiny:F16" in refused()
    cache = tmp_path / "cache"
    path = resolve(f"{NAME}:q8_0", cache)
    assert (path / "model.gguf").read_bytes() == files["tiny-Q8_0.gguf"]
    assert path.name == "tiny-Q8_0"
    assert commit_of(path) == commit
    assert model_digest(path).endswith(commit)
    assert hub.content_bytes == len(files["tiny-Q8_0.gguf"]), "no other file"
    assert caplog.text == "", "no small files are no matter"
    newer = hub.repositories[NAME].commit({"only.gguf": files["tiny-F16.gguf"]})
    assert commit_of(resolve(NAME, cache)) == newer, "the only one needs no name"
    assert resolve(f"{NAME}@{commit}:*Q8*", cache) == path


def test_a_repository_in_another_format_says_what_it_has(hub: StubHub, home: Path) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert refused() == (
        "acme/tiny has neither model.safetensors nor model.safetensors.index.json nor a GGUF file; "
        "it has config.json, pytorch_model.bin"
    )


def test_a_folder_comes_before_a_name_of_the_hub(
    hub: StubHub, home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert resolve(NAME, tmp_path / "cache") == folder
    assert hub.requests == []


def test_what_asks_for_the_speed_of_xet_is_left_to_it(
    hub: StubHub, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.loading import hub as module

    commit = hub.add_folder(NAME, folder)
    assert [
        file.size_bytes for file in module._large_files(NAME, commit, ["model.safetensors", "config.json"])
    ] == [(folder / "model.safetensors").stat().st_size]
    hub.xet_hash = "0" * 64
    monkeypatch.setattr(constants, "HF_XET_HIGH_PERFORMANCE", True)
    assert module._large_files(NAME, commit, ["model.safetensors"]) == []
    monkeypatch.setattr(constants, "HF_XET_HIGH_PERFORMANCE", False)
    assert len(module._large_files(NAME, commit, ["model.safetensors"])) == 1
