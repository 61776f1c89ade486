"""The examples run as their docs say: against a real gateway, whose workers give prepared answers."""

import asyncio
import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.request import EngineRequest, FinishReason, RequestOutput
from gateway import Tokenizer
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_model_dir

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "because it scatters"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def printed_by(model: Path, *command: str, answers: Sequence[str] = (ANSWER,)) -> str:
    """The output of the command, in which GRPC, HTTP, ROOT and PYTHON stand for the addresses and the interpreter of
    this test. `answers`: one answer for each request in turn. All further requests get the last answer."""
    return asyncio.run(_run(model, command, answers))


async def _run(model: Path, command: tuple[str, ...], answers: Sequence[str]) -> str:
    tokenizer = Tokenizer(model)
    scripts = [
        answering(list(tokenizer.encode(answer, add_special_tokens=False)), FinishReason.STOP)
        for answer in answers
    ]
    prompts: list[tuple[int, ...]] = []

    def script(request: EngineRequest) -> list[RequestOutput]:
        """Both workers of a pair get the same prompt, and a conversation's next turn has another one."""
        if request.prompt_token_ids not in prompts:
            prompts.append(request.prompt_token_ids)
        return scripts[min(prompts.index(request.prompt_token_ids), len(scripts) - 1)](request)

    async with gateway_with(model, {"p0": script}, {"d0": script}, max_model_len=4096) as tested:
        grpc = f"127.0.0.1:{tested.gateway.grpc_port}"
        http = f"http://127.0.0.1:{tested.gateway.http_port}/v1"
        here = {"GRPC": grpc, "HTTP": http, "ROOT": http.removesuffix("/v1"), "PYTHON": sys.executable}
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
    """If grpcurl is not installed, the example uses `buf curl`."""
    out = printed_by(model, "sh", "examples/grpcurl.sh")
    assert re.search(r'"has_?[cC]hat_?[tT]emplate":\s*true', out)  # the two tools write this name differently
    pieces = re.findall(r'"text":\s*"([^"]*)"', out)
    assert "".join(pieces) == ANSWER
    assert "FINISH_REASON_" in out


def test_the_openai_package(model: Path) -> None:
    out = printed_by(model, "PYTHON", "examples/openai_chat.py", "--base-url", "HTTP")
    first, second, usage = out.splitlines()
    assert (first, second) == (ANSWER, ANSWER)
    assert re.fullmatch(r"\d+ tokens in, \d+ out", usage)


def call(name: str, **arguments: str) -> str:
    """A call in the format for models whose template knows no tools."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_through_the_openai_package(model: Path) -> None:
    command = ("PYTHON", "examples/openai_tools.py", "--base-url", "HTTP")
    out = printed_by(model, *command, answers=[call("length_of", thing="tower"), ANSWER])
    assert out == f'length_of({{"thing": "tower"}}) = 330.0 m\n{ANSWER}\n'


def test_tools_through_anthropics_package(model: Path) -> None:
    command = ("PYTHON", "examples/anthropic_tools.py", "--base-url", "ROOT", "--model", "tiny")
    out = printed_by(model, *command, answers=[call("length_of", thing="tower"), ANSWER])
    assert out == f"length_of({{'thing': 'tower'}}) = 330.0 m\n{ANSWER}\n"


def test_a_coding_loop_of_twenty_turns_edits_files(model: Path, tmp_path: Path) -> None:
    steps = [
        ("write_file", {"path": "a.txt", "content": "one"}),
        ("edit_file", {"path": "a.txt", "old": "one", "new": "two"}),
        ("read_file", {"path": "a.txt"}),
        ("write_file", {"path": "../b.txt", "content": "x"}),
        ("read_file", {"path": "c.txt"}),
        ("list_files", {}),
    ]
    command = ("PYTHON", "examples/coding_loop.py", "--base-url", "HTTP", "--folder", str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    answers = [call(name, **arguments) for name, arguments in steps]
    lines = printed_by(model, *command, "--free", "task", answers=answers).splitlines()
    assert len(lines) == 20
    assert [line.split("  ")[-2:] for line in lines[:4]] == [
        ["write_file", "done"],
        ["edit_file", "done"],
        ["read_file", "two"],
        ["write_file", "error: ../b.txt is not in the folder"],
    ]
    assert lines[4].split("  ")[-1].startswith("error: ")
    assert lines[5:] == [line for line in lines[5:] if line.endswith("list_files  a.txt")]
    assert (tmp_path / "work/a.txt").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


needs_langchain = pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="LangChain is not installed here"
)


@needs_langchain
def test_tools_through_langchain(model: Path) -> None:
    command = ("PYTHON", "examples/langchain_tools.py", "--base-url", "HTTP", "--model", "tiny")
    out = printed_by(model, *command, answers=[call("length_of", thing="tower"), ANSWER])
    assert out == f"length_of({{'thing': 'tower'}}) = 330.0 m\n{ANSWER}\n"


@pytest.mark.skipif(
    importlib.util.find_spec("agents") is None, reason="OpenAI's Agents SDK is not installed here"
)
@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["whole", "streamed"])
def test_an_agent_of_the_agents_sdk(model: Path, api: str, options: tuple[str, ...]) -> None:
    command = ("PYTHON", "examples/agents_sdk.py", "--base-url", "HTTP", "--model", "tiny", "--api", api)
    out = printed_by(model, *command, *options, answers=[call("length_of", thing="tower"), ANSWER])
    assert out == f"length_of(tower) = 330.0 m\n{ANSWER}\n"


@needs_langchain
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
@pytest.mark.parametrize(
    ("pictures", "num_headings"),
    [(("--pictures", "preemption", "remote-kv"), 3), pytest.param((), 6, marks=pytest.mark.by_hand)],
    ids=["two", "all"],
)
@pytest.mark.usefixtures("forked_workers")
def test_the_schedulers_pictures_are_drawn_from_real_runs(
    folder: Path,
    pictures: tuple[str, ...],
    num_headings: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["draw_scheduler.py", "--model", str(folder), *options])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(ROOT / "examples/draw_scheduler.py"), run_name="__main__")
        return capsys.readouterr().out

    drawn = draw(*pictures)
    for _ in range(MAX_DRAWS - 1):
        if "preempted" in drawn:
            break
        drawn += draw("--pictures", "preemption")
    document = (ROOT / "docs/scheduler.md").read_text()
    headings = re.findall(r"^w\d  .* tokens a step", drawn, re.MULTILINE)
    assert (
        len(set(headings)) == num_headings
    )  # a chart that is too wide for its page goes on below its heading again
    assert all(heading in document for heading in headings)
    assert "preempted" in drawn
    assert "waits for KV from another worker" in drawn
