"""The examples run as their docs say: against a real gateway, whose workers answer by heart."""

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import Tokenizer
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_model_dir

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "because it scatters"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def printed_by(model: Path, *command: str) -> str:
    """GRPC, HTTP and PYTHON in the command stand for what they are here."""
    return asyncio.run(_run(model, command))


async def _run(model: Path, command: tuple[str, ...]) -> str:
    script = answering(list(Tokenizer(model).encode(ANSWER, add_special_tokens=False)))
    async with gateway_with(model, {"p0": script}, {"d0": script}) as tested:
        grpc = f"127.0.0.1:{tested.gateway.grpc_port}"
        http = f"http://127.0.0.1:{tested.gateway.http_port}/v1"
        here = {"GRPC": grpc, "HTTP": http, "PYTHON": sys.executable}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where buf is
        process = await asyncio.create_subprocess_exec(
            *[here.get(part, part) for part in command],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "TARGET": grpc, "BASE_URL": http, "MODEL": "tiny"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TIMEOUT_S):
            out, errors = await process.communicate()
    assert process.returncode == 0, f"{errors.decode()}\n{out.decode()}"
    return out.decode()


def test_curl(model: Path) -> None:
    whole, stream = printed_by(model, "sh", "examples/curl.sh").split("\n", 1)
    assert json.loads(whole)["choices"][0]["message"]["content"] == ANSWER
    *events, end = re.findall(r"^data: (.*)$", stream, re.MULTILINE)
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == ANSWER
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_grpcurl(model: Path) -> None:
    """Or `buf curl`, where there is none."""
    out = printed_by(model, "sh", "examples/grpcurl.sh")
    assert re.search(r'"has_?[cC]hat_?[tT]emplate":\s*true', out)  # each tool has names of its own
    pieces = re.findall(r'"text":\s*"([^"]*)"', out)
    assert "".join(pieces) == ANSWER
    assert "FINISH_REASON_" in out


def test_the_openai_package(model: Path) -> None:
    out = printed_by(model, "PYTHON", "examples/openai_chat.py", "--base-url", "HTTP")
    first, second, usage = out.splitlines()
    assert (first, second) == (ANSWER, ANSWER)
    assert re.fullmatch(r"\d+ tokens in, \d+ out", usage)


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="LangChain is not installed here"
)
def test_langchain(model: Path) -> None:
    command = ("examples/langchain_stream.py", "--base-url", "HTTP", "--model", "tiny")
    assert printed_by(model, "PYTHON", *command) == f"{ANSWER}\n"


def test_the_python_client(model: Path) -> None:
    nobody = ("--target", "127.0.0.1:9")
    out = printed_by(model, "PYTHON", "examples/python_client.py", *nobody, "--target", "GRPC")
    answer, cost = out.splitlines()
    assert answer == f"tiny: {ANSWER}"
    assert re.fullmatch(r"\d+ tokens in \d+\.\d\d s", cost)


def test_every_example_is_in_the_list() -> None:
    listed = (ROOT / "examples/README.md").read_text()
    names = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh", ".yaml")}
    assert {name for name in names if f"({name})" not in listed} == set()


MAX_DRAWS = 8
"""On a busy machine one request may end before the next one arrives, and then none is preempted."""


@pytest.mark.slow
def test_the_schedulers_pictures_are_drawn_from_real_runs(folder: Path) -> None:
    drawn = drawn_by_scheduler(folder)
    for _ in range(MAX_DRAWS - 1):
        if "preempted" in drawn:
            break
        drawn += drawn_by_scheduler(folder, "--pictures", "preemption")
    document = (ROOT / "docs/scheduler.md").read_text()
    headings = re.findall(r"^w\d  .* tokens a step", drawn, re.MULTILINE)
    assert len(set(headings)) == 6  # a chart that is too wide for its page goes on below its heading again
    assert all(heading in document for heading in headings)
    assert "preempted" in drawn
    assert "waits for KV from another worker" in drawn


def drawn_by_scheduler(model: Path, *options: str) -> str:
    command = [sys.executable, "examples/draw_scheduler.py", "--model", str(model), *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    return result.stdout
