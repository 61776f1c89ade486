"""`baton trace`: the printed picture, and the messages when there is nothing to draw."""

from pathlib import Path

import pytest

from baton.config import BatonConfig
from cli.commands.trace import parse_steps
from cli.main import DONE, REFUSED, USAGE, main, with_absolute_paths
from cli.trace_chart.columns import StepRange
from tests.factories.traces import CHUNKED, HANDED_OVER, make_trace
from worker.step_trace import Trace, encode_end, encode_header, encode_step


def write(path: Path, trace: Trace) -> str:
    lines = [encode_header(trace.header), *map(encode_step, trace.steps), encode_end(trace.end)]
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "w0.jsonl", CHUNKED)


def test_it_prints_the_picture(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", file]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "w0  decode worker, 100 tokens a step, 50 blocks of 16"
    assert "two          70        [40] [30]  1    1   ■ length" in lines
    assert not any("\x1b" in line for line in lines), "no colours in a file"


def test_it_draws_several_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = HANDED_OVER
    files = [
        write(tmp_path / "p0.jsonl", prefill),
        write(tmp_path / "d0.jsonl", make_trace(decode.steps, "d0")),
    ]
    assert main(["trace", *files]) == DONE
    out = capsys.readouterr().out
    assert out.index("p0  prefill worker") < out.index("d0  decode worker")


def test_it_draws_a_part(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", file, "--steps", "2:3", "--requests", "t", "--max-columns", "1"]) == DONE
    out = capsys.readouterr().out
    assert "[30]" in out
    assert "one  " not in out
    assert "1 later step is left out" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "7:"], "w0.jsonl: nothing to draw; the trace holds steps 1 to 5"),
        (["--requests", "x,yy"], "no request id in these steps starts with 'x' or 'yy'\n"),
        (
            ["--requests", "x", "--max-columns", "1"],
            "no request id in these steps starts with 'x'; later steps are left out (4); see --steps",
        ),
    ],
)
def test_nothing_to_draw_is_a_refusal(
    file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", file, *arguments]) == REFUSED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "w.jsonl: the file is empty"),
        ("# Notes\n", "w.jsonl:1: not a step trace"),
        (
            encode_header(CHUNKED.header).decode(),
            "w.jsonl: nothing to draw; the worker has not finished a step yet",
        ),
        (encode_header(CHUNKED.header).decode() + "{}\n\n", "w.jsonl:2: not a step"),
    ],
)
def test_a_file_that_is_no_trace_is_a_refusal(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    assert main(["trace", str(path)]) == REFUSED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "No such file or directory: 'no-such-file'"),
        (["FILE", "--steps", "one"], "--steps: got 'one'"),
        (["FILE", "--steps", "3:2"], "--steps: got '3:2'; the last step must not be before the first"),
        (["FILE", "--max-columns", "0"], "--max-columns: got 0"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *[file if word == "FILE" else word for word in arguments]]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("baton trace: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (None, StepRange(None, None)),
        (":", StepRange(None, None)),
        ("3", StepRange(3, 3)),
        ("3:", StepRange(3, None)),
        (":9", StepRange(None, 9)),
        ("3:9", StepRange(3, 9)),
    ],
)
def test_ranges_of_steps(text: str | None, steps: StepRange) -> None:
    assert parse_steps(text) == steps


def test_workers_write_where_the_command_was_started() -> None:
    config = BatonConfig.from_mapping({"engine": {"trace_dir": "traces", "num_threads": 3}})
    resolved = with_absolute_paths(config, Path("/home/me"))
    assert resolved.engine.trace_dir == "/home/me/traces"
    assert resolved.engine.num_threads == 3
    assert with_absolute_paths(resolved, Path("/elsewhere")) == resolved
    assert with_absolute_paths(BatonConfig(), Path("/home/me")) == BatonConfig()


def test_workers_write_into_a_folder_of_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = BatonConfig.from_mapping({"engine": {"trace_dir": "~/traces"}})
    assert with_absolute_paths(config, Path("/elsewhere")).engine.trace_dir == "/home/me/traces"


def test_a_draft_models_folder_is_found_by_workers_that_run_in_another_one(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    for given, resolved in (("draft", str(tmp_path / "draft")), ("org/name", "org/name")):
        speculation = {"method": "draft_model", "draft_model": given}
        config = with_absolute_paths(BatonConfig.from_mapping({"speculation": speculation}), tmp_path)
        assert config.speculation.draft_model == resolved
