"""The entry of the `baton` command: Ctrl-C during its imports ends it quietly, and its end takes nothing apart."""

import subprocess
import sys
import tomllib

import pytest

from tests.test_architecture import ROOT

STATUS, SERVE = ["status", "--target", "127.0.0.1:9"], ["serve", "--ray-address", "none"]


@pytest.mark.parametrize(
    ("module", "number", "arguments", "code"),
    [
        ("cli.main", "SIGINT", STATUS, 130),
        ("pydantic", "SIGINT", STATUS, 130),
        ("cli.commands.status", "SIGINT", STATUS, 130),
        ("cli.main", "SIGTERM", SERVE, 130),
        ("cli.commands.servers", "SIGTERM", SERVE, 130),
        ("cli.commands.status", "SIGTERM", STATUS, -15),
    ],
)
def test_a_signal_during_an_import_leaves_no_traceback(
    module: str, number: str, arguments: list[str], code: int
) -> None:
    program = (
        "import signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        f"            signal.raise_signal(signal.{number})\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from cli.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from cli.__main__ import main\n"
        "sys.argv[1:] = ['key', 'alice', '--json']\n"
        "code = main()\n"
        "sys.exit(code if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else 'not ignored')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["key", "alice", "--json"], 0), (["serve", "no-such.yaml"], 2)]
)
def test_it_ends_without_taking_its_modules_apart(arguments: list[str], code: int) -> None:
    program = (
        "import atexit, os, sys\n"
        "from cli.__main__ import main\n"
        "class Part:\n"
        "    def __del__(self, write=os.write):\n"
        "        write(2, b'taken apart')\n"
        "part = Part()\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "code = main()\n"
        "atexit.register(print, 'the last hook')\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stdout.endswith("the last hook\n")
    assert "taken apart" not in done.stderr


def test_it_is_the_entry_of_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"baton": "cli.__main__:main"}
