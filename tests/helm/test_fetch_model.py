"""The init container that fetches a model: whole files with the right hash, or none."""

import hashlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.factories.chart import FOLDER, Object, containers, needs_helm, refusal, render

PROGRAM = FOLDER / "files" / "fetch_model.py"
QUERY = "?download=true"
"""The end of the Hub's links. It is no part of a file's name."""
CONTENT = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000}


class Quiet(SimpleHTTPRequestHandler):
    asked_for: ClassVar[list[str]] = []
    """The paths that the present test has requested."""
    patience: ClassVar[threading.Event] = threading.Event()
    """Answers wait for this event."""

    def do_GET(self) -> None:
        self.asked_for.append(self.path)
        self.patience.wait(60)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Keeps log lines out of the output of tests."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder with the files, over HTTP."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    Quiet.asked_for.clear()
    Quiet.patience.set()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def command(tmp_path: Path, url: str, *flags: str, **hashes: str) -> list[str]:
    right = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()} | hashes
    files = tmp_path / "files.json"
    entries = [{"url": f"{url}/{name}{QUERY}", "sha256": sha256} for name, sha256 in right.items()]
    files.write_text(json.dumps(entries))
    return [sys.executable, str(PROGRAM), str(files), str(tmp_path / "models" / "mine"), *flags]


def fetch(tmp_path: Path, url: str, *flags: str, **hashes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, url, *flags, **hashes), capture_output=True, text=True, timeout=120
    )


def there(tmp_path: Path) -> dict[str, bytes]:
    """The files in the folder, without the locks, which stay."""
    folder = tmp_path / "models" / "mine"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_files_are_fetched_once(tmp_path: Path, url: str) -> None:
    assert fetch(tmp_path, url).returncode == 0
    assert there(tmp_path) == CONTENT
    again = fetch(tmp_path, "http://127.0.0.1:9")  # where nothing answers
    assert (again.returncode, again.stdout) == (0, "config.json is there\nmodel.safetensors is there\n")


def test_of_pods_that_start_together_one_fetches_each_file(tmp_path: Path, url: str) -> None:
    Quiet.patience.clear()  # so that all have found the file missing before the first one has it
    said = queue.Queue[str]()
    pods = [threading.Thread(target=run_and_tell, args=(command(tmp_path, url), said)) for _ in range(3)]
    for pod in pods:
        pod.start()
    waiting = "config.json is being fetched by another pod; waiting\n"
    assert [said.get(timeout=60) for _ in range(2)] == [waiting] * 2
    Quiet.patience.set()
    for pod in pods:
        pod.join()
    assert sorted(Quiet.asked_for) == [f"/{name}{QUERY}" for name in CONTENT]
    assert there(tmp_path) == CONTENT
    done = sorted(line for line in said.queue if line.startswith("config.json"))
    assert done == ["config.json fetched\n", *["config.json is there\n"] * 2]
    assert [line for line in said.queue if line.startswith("exit code")] == ["exit code 0"] * 3


def run_and_tell(arguments: list[str], said: queue.Queue[str]) -> None:
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        for line in pod.stdout:
            said.put(line)
    said.put(f"exit code {pod.returncode}")


def test_what_a_killed_fetch_left_is_removed(tmp_path: Path, url: str) -> None:
    Quiet.patience.clear()
    with subprocess.Popen(command(tmp_path, url)) as pod:
        while not Quiet.asked_for:
            time.sleep(0.01)
        pod.kill()
    Quiet.patience.set()
    assert len(there(tmp_path)) == 1, "half a file"
    assert fetch(tmp_path, url).returncode == 0
    assert there(tmp_path) == CONTENT


def test_a_damaged_file_is_fetched_anew(tmp_path: Path, url: str) -> None:
    fetch(tmp_path, url)
    (tmp_path / "models" / "mine" / "config.json").write_bytes(b"{")
    assert fetch(tmp_path, url).returncode == 0
    assert there(tmp_path) == CONTENT


def test_another_file_is_not_kept(tmp_path: Path, url: str) -> None:
    done = fetch(tmp_path, url, **{"model.safetensors": "0" * 64})
    assert done.returncode == 1
    assert "model.safetensors: sha256 is" in done.stderr
    assert set(there(tmp_path)) == {"config.json"}, "no draft either"


@pytest.mark.parametrize(
    "body", [b"Content-Length: 9\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n9\r\nhalf"]
)
def test_a_connection_that_breaks_is_no_wrong_hash(tmp_path: Path, url: str, body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quiet, "do_GET", lambda answer: answer.wfile.write(b"HTTP/1.1 200 OK\r\n" + body))
        done = fetch(tmp_path, url)
    assert done.returncode == 1
    assert done.stderr == "fetch_model.py: config.json: the connection broke before the end of the file\n"
    assert there(tmp_path) == {}, "no draft either"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a b", "http://[::1"])
def test_an_unusable_url_is_named(tmp_path: Path, url: str) -> None:
    done = fetch(tmp_path, url.replace("//", "//me:s3cret@"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"fetch_model.py: {url}/config.json: not a usable URL, or not HTTP (")
    assert len(done.stderr.splitlines()) == 1
    assert "s3cret" not in done.stderr


def test_gateways_leave_the_weights_out(tmp_path: Path, url: str) -> None:
    assert fetch(tmp_path, url, "--skip", "*.safetensors").returncode == 0
    assert set(there(tmp_path)) == {"config.json"}


@needs_helm
@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/models/tiny.Q4_K_M.gguf", {"url": "https://example.com/tiny.Q4_K_M.gguf"}),
        ("/models/mine/tiny.gguf", {"url": "https://example.com/a?file=1", "name": "tiny.gguf"}),
    ],
    ids=["by its URL", "by its name"],
)
def test_a_gguf_file_is_fetched_into_its_folder(path: str, file: dict[str, str]) -> None:
    """The target is not the file's own path: then the file would be below itself."""
    files = [file | {"sha256": "a" * 64}]
    for pod in render({"model": {"path": path, "download": {"files": files}}}).pods().values():
        assert containers(pod)["fetch-model"]["command"][3] == str(Path(path).parent)


REFUSED: dict[str, tuple[Object, list[str]]] = {
    "a model of the Hub that is downloaded twice": (
        {
            "model": {
                "path": "acme/tiny",
                "download": {"files": [{"url": "https://a.b/c", "sha256": "a" * 64}]},
            }
        },
        ["model.path (acme/tiny) is a model of the Hub", "remove model.download.files"],
    ),
    "downloads into a volume to read": (
        {
            "model": {
                "path": "a/b",
                "persistentVolumeClaim": {"create": True, "accessModes": ["ReadOnlyMany"]},
            }
        },
        ["model.persistentVolumeClaim.accessModes: pods write"],
    ),
    "two downloads of one name": (
        {
            "model": {
                "path": "/models/mine",
                "download": {
                    "files": [
                        {"url": "https://a.b/config.json?download=true", "sha256": "a" * 64},
                        {"url": "https://a.b/c", "name": "config.json", "sha256": "b" * 64},
                    ]
                },
            }
        },
        ['model.download.files: https://a.b/c: another file is named "config.json", too; set name'],
    ),
    "a GGUF file that no download brings": (
        {
            "model": {
                "path": "/models/tiny.gguf",
                "download": {"files": [{"url": "https://a.b/other.gguf?file=tiny.gguf", "sha256": "a" * 64}]},
            }
        },
        ["model.path (/models/tiny.gguf) is a GGUF file", "set the name of the entry to tiny.gguf"],
    ),
}


@needs_helm
@pytest.mark.parametrize("case", REFUSED)
def test_downloads_that_do_not_fit_the_model_are_refused(case: str) -> None:
    values, expected = REFUSED[case]
    said = refusal(values)
    assert [words for words in expected if words not in said] == []


def proxy(name: str) -> list[dict[str, str]]:
    return [{"name": "https_proxy", "value": f"http://{name}:3128"}]


@needs_helm
def test_every_pod_fetches_what_it_needs() -> None:
    files = [{"url": "https://example.com/config.json", "sha256": "a" * 64}]
    model = {"model": {"path": "/models/mine", "download": {"files": files}}}
    parts = {"gateway": "gateway", "head": "rayHead", "prefill": "prefill", "decode": "decode"}
    release = render(model | {part: {"extraEnv": proxy(part)} for part in parts.values()})
    assert json.loads(release.one("ConfigMap", "-fetch")["data"]["files.json"]) == files
    assert release.one("ConfigMap", "-fetch")["data"]["fetch_model.py"].strip() == PROGRAM.read_text().strip()
    for component, pod in release.pods().items():
        command = containers(pod)["fetch-model"]["command"]
        assert command[3] == "/models/mine"
        assert containers(pod)["fetch-model"]["env"] == proxy(parts[component])
        assert ("--skip" in command) is (component in ("gateway", "head"))
