"""A Hub on loopback with commits, etags, redirects to a content network, and ranges; it can misbehave."""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

TOKEN = "hf_stub"
"""The token of an account that may read everything."""
LARGE_SUFFIXES = (".safetensors", ".gguf")
"""Marks files that the content network stores by their sha256."""


def commit_of_text(text: str) -> str:
    """The hash of a commit, made from any text that tells commits apart."""
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass(slots=True)
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The content of files, by commit and path."""
    refs: dict[str, str] = field(default_factory=dict)
    """The commit of a branch or tag."""
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit, and moves the branch to it."""
        commit = commit_of_text(f"{len(self.commits)} {branch} {sorted(files)}")
        self.commits[commit] = dict(files)
        self.refs[branch] = commit
        return commit


class StubHub:
    """The Hub and its content network, on two ports. Clients see two hosts."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        """The method and path of each request."""
        self.content_bytes = 0
        """Bytes that the content network has sent."""
        self.tokens_leaked = 0
        """Number of requests to the content network that contained a token."""
        self.knows_ranges = True
        self.is_down = False
        """Whether the Hub answers 503."""
        self.page = b""
        """If set, the Hub's answer to everything, as from a captive portal."""
        self.breaks_after: list[int] = []
        """The next answers of the content network end after these numbers of bytes."""
        self.holds_after: int | None = None
        """Answers of the content network stop after this many bytes, until `go_on`."""
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self.xet_hash: str | None = None
        """The xet hash of all large files in listings."""
        self.damage = b""
        """Bytes that replace the first bytes of files on the content network."""
        self._lock = threading.Lock()
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), _handler(answer)) for answer in (self._hub, self._content)
        ]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def content_endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def add_folder(self, repo: str, folder: Path, **more: bytes) -> str:
        """Commits the folder's files to `main`. `more` has further files by name, with `__` for a dot."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        extra = {name.replace("__", "."): content for name, content in more.items()}
        return self.repositories.setdefault(repo, Repository()).commit(files | extra)

    def close(self) -> None:
        self.go_on.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _hub(self, http: "_Handler") -> None:
        path = unquote(urlsplit(http.path).path)
        with self._lock:
            self.requests.append(f"{http.command} {path}")
        if self.is_down or self.page:
            return http.answer(503 if self.is_down else 200, content=self.page)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repository = self.repositories.get(match[1]) if match else None
        token = http.headers.get("authorization", "").removeprefix("Bearer ")
        if match is None or repository is None:  # the Hub answers this for private ones, too
            return http.answer(401 if not token else 404, {"X-Error-Code": "RepoNotFound"})
        revision = (api[3] or "main") if api else match[2]
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return http.answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if api:
            listing = [_entry(name, content, self.xet_hash) for name, content in files.items()]
            return http.json(listing if api[2] == "tree" else {"id": match[1], "sha": commit})
        if repository.is_gated and token != TOKEN:
            return http.answer(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        if match[3] not in files:
            return http.answer(404, {"X-Error-Code": "EntryNotFound"})
        return self._file(http, commit, files[match[3]], match[3])

    def _file(self, http: "_Handler", commit: str, content: bytes, name: str) -> None:
        if not name.endswith(LARGE_SUFFIXES):
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_sha(content)}"'}
            return http.answer(200, headers, content)
        sha = hashlib.sha256(content).hexdigest()
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.content_endpoint}/{sha}?signature=once",
        }
        return http.answer(302, headers)

    def _content(self, http: "_Handler") -> None:
        sha = urlsplit(http.path).path.lstrip("/")
        contents = [
            c for r in self.repositories.values() for files in r.commits.values() for c in files.values()
        ]
        content = next(c for c in contents if hashlib.sha256(c).hexdigest() == sha)
        content = self.damage + content[len(self.damage) :]
        first = re.fullmatch(r"bytes=(\d+)-", http.headers.get("range", "")) if self.knows_ranges else None
        start = int(first[1]) if first else 0
        with self._lock:
            self.requests.append(f"{http.command} content from {start}")
            self.tokens_leaked += "authorization" in http.headers
            end = start + self.breaks_after.pop(0) if self.breaks_after else len(content)
        headers = {"Content-Length": str(len(content) - start)}
        if first:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        http.begin(206 if first else 200, headers)
        step = 16_384
        for position in range(start, min(end, len(content)), step):
            if self.holds_after is not None and position - start >= self.holds_after:
                self.is_held.set()
                self.go_on.wait(60)
            part = content[position : min(position + step, end)]
            http.wfile.write(part)
            with self._lock:
                self.content_bytes += len(part)
        http.close_connection = True


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    hub = StubHub()
    try:
        yield hub
    finally:
        hub.close()


def environment_of(hub: StubHub, home: Path, **more: str) -> dict[str, str]:
    """The environment of a process that uses the stub, with its cache in `home`."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        **more,
    }


def use_in_this_process(hub: StubHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets this environment in this process, although huggingface_hub has already read the old one."""
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)  # for caplog
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # the next session uses the environment of this test


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status: int, headers: Mapping[str, str] | None = None, content: bytes = b"") -> None:
        self.begin(status, {**(headers or {}), "Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, value: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        """Prints nothing: failed tests explain themselves."""


def _handler(answer: object) -> type[_Handler]:
    def do(http: _Handler) -> None:
        try:
            answer(http)  # type: ignore[operator]
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            http.close_connection = True

    return type("Handler", (_Handler,), {"do_GET": do, "do_HEAD": do})


def _entry(path: str, content: bytes, xet_hash: str | None) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _git_sha(content)}
    if path.endswith(LARGE_SUFFIXES):
        sha = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
        if xet_hash is not None:
            entry["xetHash"] = xet_hash
    return entry


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
