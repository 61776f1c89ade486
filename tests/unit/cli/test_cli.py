"""The command's edge: exit codes, messages, and what it does not import."""

import io
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest

from baton.system.logs import PACKAGES
from cli.commands import generate
from cli.main import DEFAULT_TARGET, DONE, READER_LEFT, REFUSED, UNWRITABLE, USAGE, build_parser, main
from cli.output import replace_unencodable
from tests.factories.traces import CHUNKED
from worker.step_trace import encode_end, encode_header, encode_step

ROOT = Path(__file__).parents[3]
NO_COUNTS = ("0", "-1", "4294967296", "9" * 5_000, "1.5", "many", "٣")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "COMMAND"),
        ("role w0 both", "'both'"),
        *(
            (
                f"generate {flag}={number} hello",
                f"argument {flag}: got '{number[:30]}'; must be a number from ",
            )
            for flag, numbers in (
                ("--max-tokens", NO_COUNTS),
                ("--max-model-len", NO_COUNTS),
                ("--seed", ("-1", "99999999999999999999", "9" * 5_000, "one")),
            )
            for number in numbers
        ),
    ],
)
def test_arguments_that_cannot_be_are_usage_errors(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == USAGE
    assert words in capsys.readouterr().err


def test_the_help_of_each_command_says_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*command: str) -> str:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        return " ".join(capsys.readouterr().out.split())

    assert "drain remove a worker for good; its requests continue on other workers" in help_of()
    assert "Remove a worker for good; its requests continue on other workers." in help_of("drain")
    assert "List the models that are cached on this machine" in help_of("models")


def test_the_version_is_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"baton {version('baton')}\n"


def test_a_bad_configuration_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("cluster: {decode: 0}\nmodel: {colour: red}\n")
    assert main(["serve", str(file)]) == USAGE
    message = capsys.readouterr().err
    assert f"{file}: cluster.decode: got 0" in message
    assert f"{file}: model.colour: unknown key" in message


def test_a_missing_configuration_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/file.yaml"]) == USAGE
    assert "/no/such/file.yaml" in capsys.readouterr().err


def test_flags_win_over_the_file_and_are_validated_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("cluster: {decode: 1}\n")
    assert main(["serve", str(file), "--decode", "-1"]) == USAGE
    assert "cluster.decode: got -1" in capsys.readouterr().err


def test_an_unknown_model_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "no-such-model"]) == REFUSED
    assert "'no-such-model' is neither a folder, nor a GGUF file, nor a known name" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "drain w0", "role w0 decode", "rollout", "flush-cache"])
def test_an_unreachable_gateway_is_a_refusal_with_advice(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--target", "127.0.0.1:9"]) == REFUSED
    message = capsys.readouterr().err
    assert "127.0.0.1:9" in message
    assert message.startswith(f"baton {command.split()[0]}: ")


def test_a_gateway_without_a_commands_method_may_be_older(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # it has no service at all
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert main(["flush-cache", "--target", f"127.0.0.1:{port}"]) == REFUSED
    finally:
        server.stop(None)
    assert "the gateway may run an older version of Baton" in capsys.readouterr().err


def test_an_argument_that_is_no_text_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", os.fsdecode(b"w\xff0")]) == USAGE
    assert capsys.readouterr().err == "baton: an argument is not valid UTF-8: 'w\\udcff0'\n"
    assert main(["probe", "http://h:1/é"]) == USAGE


PRINTS = ["models", "models --json", "trace FILE"]
"""Commands that print without a fleet."""


def run_with_stdout(arguments: str, stdout: int | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`stdout`: a file descriptor, or a redirection of the shell."""
    lines = [encode_header(CHUNKED.header), *map(encode_step, CHUNKED.steps), encode_end(CHUNKED.end)]
    (trace := folder / "w0.jsonl").write_bytes(b"".join(lines))
    command = [sys.executable, "-m", "cli.main", *arguments.replace("FILE", str(trace)).split()]
    if isinstance(stdout, str):
        command = ["sh", "-c", f'exec "$0" "$@" {stdout}', *command]
        stdout = subprocess.DEVNULL
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PRINTS)
def test_a_reader_that_has_left_is_no_error(arguments: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_with_stdout(arguments, writing, tmp_path)
    os.close(writing)
    assert (done.returncode, done.stderr) == (READER_LEFT, "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [*PRINTS, "--version", "serve --help"])
def test_an_output_that_cannot_be_written_is_one_line(arguments: str, tmp_path: Path) -> None:
    done = run_with_stdout(arguments, ">/dev/full", tmp_path)
    command = "baton" if "--" in arguments.removesuffix(" --json") else f"baton {arguments.split()[0]}"
    assert (done.returncode, done.stderr) == (
        UNWRITABLE,
        f"{command}: cannot write to stdout: No space left on device\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PRINTS)
def test_without_stdout_the_output_is_discarded(arguments: str, tmp_path: Path) -> None:
    done = run_with_stdout(arguments, ">&-", tmp_path)
    assert (done.returncode, done.stderr) == (DONE, "")


def test_characters_that_stdout_lacks_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    replace_unencodable()
    print("é 🎉", flush=True)
    assert written.getvalue() == b"\xe9 ?\n"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "🎉"), ("latin-1", r"\ud83c\udf89")])
def test_json_loses_no_character(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert generate._line_of({"text": "🎉"}) == f'{{"text": "{shown}"}}\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "foreign"),
    [
        ("--help", "baton.py"),
        ("status", "gateway/__init__.py"),
        ("serve", "scheduler.py"),  # which only workers import
    ],
)
def test_a_foreign_package_in_place_of_our_own_is_named(command: str, foreign: str, tmp_path: Path) -> None:
    (file := tmp_path / foreign).parent.mkdir(exist_ok=True)
    file.touch()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli", command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == REFUSED
    assert done.stderr.endswith(
        f": {file} is imported in place of Baton's own; remove its folder from PYTHONPATH\n"
    )
    assert done.stderr.count("\n") == 1


def test_all_packages_of_baton_are_looked_for() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {f"{package}*" for package in PACKAGES} == {*packages["include"]} - {"simulator*"}


@pytest.mark.slow
def test_the_default_target_is_where_serve_listens_by_default() -> None:
    options = build_parser().parse_args(["generate", "hello"])
    assert options.target == DEFAULT_TARGET == "127.0.0.1:50051"


# Ends the program where it first imports Ray, and says how the environment looks by then.
AT_IMPORT_OF_RAY = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "ray":
            print(os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], os.environ["RAY_AUTH_MODE"])
            os._exit(0)
sys.meta_path.insert(0, Finder())
sys.stdout.reconfigure(line_buffering=True)
from cli.main import main
main([sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_ray_is_not_imported_before_its_environment_is_ready(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT_OF_RAY, command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 token"


CLIENTS = (
    "--help",
    "generate --target 127.0.0.1:9 hi",
    "status --target 127.0.0.1:9",
    "top --target 127.0.0.1:9",
    "drain --target 127.0.0.1:9 w0",
    "role --target 127.0.0.1:9 w0 decode",
    "rollout --target 127.0.0.1:9",
    "flush-cache --target 127.0.0.1:9",
    "trace no-such-file",
)


@pytest.mark.slow
def test_clients_start_without_ray_torch_and_transformers() -> None:
    program = (
        "import sys\n"
        "from cli.main import main\n"
        f"for command in {CLIENTS!r}:\n"
        "    try:\n"
        "        main(command.split())\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    found = [name for name in ('ray', 'torch', 'transformers') if name in sys.modules]\n"
        "    print('imported:', command, found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert lines == [f"imported: {command} []" for command in CLIENTS]


def test_grpc_writes_no_line_for_each_handshake_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Strangers could fill a disk with such lines."""
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    assert main(["serve", "/no/such/file.yaml"]) == USAGE
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG", "a user who asks for more gets it"
    monkeypatch.delenv("GRPC_VERBOSITY")
    assert main(["serve", "/no/such/file.yaml"]) == USAGE
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"
