"""Rules that hold for the whole tree."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "baton",
    "cli",
    "cluster",
    "decode_worker",
    "engine",
    "gateway",
    "kv_transfer",
    "prefill_worker",
    "scheduler",
    "simulator",
    "worker",
)
MAX_LINES = 400

# What other packages may import from a package. A change here is a change of the architecture.
PUBLIC_NAMES = {
    "decode_worker": {"DecodeRole", "KVConsumerScheduler"},
    "gateway": {"Gateway", "GatewayClient", "GatewayError", "ServedModel", "Tokenizer"},
    "kv_transfer": {
        "BlockMover",
        "CudaMemory",
        "CudaOutOfMemory",
        "DeviceBlocks",
        "KVConnectorMetadata",
        "RankedConnector",
        "SharedMemory",
        "pinned_array",
    },
    "prefill_worker": {"KVProducerScheduler", "PrefillRole"},
    "scheduler": {"KVConnector", "Request", "RequestStatus", "Scheduler"},
}


def modules(*folders: str) -> list[Path]:
    """Python files written by hand."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if not {"v1", "generated"} & set(file.relative_to(ROOT).parts)]


def names_in(file: Path, of: set[str]) -> set[str]:
    """The names in `of` that the file contains as a name, an attribute or a part of an imported module's name."""
    text = file.read_text()
    if not any(name in text for name in of):
        return set()  # parsing takes most of the time of these tests
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.Import(names=imported):
                names.update(part for alias in imported for part in alias.name.split("."))
            case ast.ImportFrom(module=module, names=imported):
                names.update((module or "").split("."), (alias.name for alias in imported))
    return names & of


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", PACKAGES)
def test_root_packages_resolve_inside_the_repository(name: str) -> None:
    """PyPI has packages called `scheduler` and `cluster`; none of them may win."""
    assert importlib.import_module(name).__path__[0] == str(ROOT / name)


def test_every_module_says_what_it_is() -> None:
    files = modules(*PACKAGES, "benchmarks")
    assert len(files) > 500
    docstrings = {relative(file): ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    assert [name for name, docstring in docstrings.items() if not docstring] == [], "without a docstring"
    no_sentences = [
        f"{name}: {docstring!r}"
        for name, docstring in docstrings.items()
        if "\n" not in docstring and not docstring.endswith((".", ":"))
    ]
    assert no_sentences == [], "no sentence"


def test_only_one_module_knows_how_python_is_started() -> None:
    """Another module could forget `-P`. Then Python would import from a folder of strangers: see `module_command`."""
    found = [relative(file) for file in modules(*PACKAGES) if "sys.executable" in file.read_text()]
    assert found == ["baton/system/module_command.py"]


def test_files_stay_readable() -> None:
    files = modules(*PACKAGES, "benchmarks", "tests")
    assert len(files) > 1_000
    num_lines = {relative(file): len(file.read_text().splitlines()) for file in files}
    assert {name: num for name, num in num_lines.items() if num > MAX_LINES} == {}, "look for the seam"


def test_no_public_class_name_is_defined_twice() -> None:
    """So `git grep -w NAME` finds one thing, and a reader need not ask which of two is meant."""
    places: dict[str, list[str]] = {}
    for file in modules(*PACKAGES):
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[:(\[]", file.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(relative(file))
    assert len(places) > 1_000
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_names_are_pinned(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) == PUBLIC_NAMES[name]
    for public in package.__all__:
        assert getattr(package, public) is not None


@pytest.mark.parametrize("name", sorted(set(PACKAGES) - set(PUBLIC_NAMES)))
def test_packages_without_public_names_export_nothing(name: str) -> None:
    tree = ast.parse((ROOT / name / "__init__.py").read_text())
    assert [type(node).__name__ for node in tree.body] == ["Expr"], (
        f"{name}/__init__.py holds more than its sentence"
    )


def test_one_module_knows_ray_remote() -> None:
    users = [
        relative(file) for file in modules(*PACKAGES) if re.search(r"\bray\.remote\b\(", file.read_text())
    ]
    assert users == ["cluster/on_ray/calls.py"]


def test_only_on_ray_imports_ray() -> None:
    users = [
        relative(file)
        for file in modules(*PACKAGES)
        if re.search(r"^\s*(import|from) ray\b", file.read_text(), re.MULTILINE)
    ]
    assert users
    assert [file for file in users if not file.startswith("cluster/on_ray/")] == []


def test_a_controller_needs_neither_the_gateway_nor_torch() -> None:
    """Ray ships some of our packages to the nodes of a cluster, and a head has no device."""
    block = "sys.modules.update(dict.fromkeys(('gateway', 'torch', 'grpc')))"
    program = f"import sys; {block}; import cluster.on_ray.controller"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_pickled_but_by_ray() -> None:
    """A process that unpickles a peer's message runs what the peer wants. Only Ray's own calls may: Ray is trusted."""
    pickles = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "send_pyobj", "recv_pyobj"}
    users = [
        f"{relative(file)} uses {name}"
        for file in modules(*sorted(set(PACKAGES) - {"cluster"}))
        for name in sorted(names_in(file, pickles))
    ]
    assert users == []
    assert [file for file in modules("cluster") if names_in(file, {"send_pyobj", "recv_pyobj"})] == []


def test_only_the_edge_reads_the_secret() -> None:
    """Below the entry points only one module knows the secret's file and variable; keys are handed down."""
    from baton.system.secret import SECRET_VARIABLE

    below = modules(*sorted(set(PACKAGES) - {"cli", "cluster"}))
    assert [relative(file) for file in below if names_in(file, {"secret_file", "load_secret"})] == [
        "baton/config/network.py",
        "baton/system/secret.py",
        "worker/process.py",
    ]
    assert [relative(file) for file in below if f'"{SECRET_VARIABLE}"' in file.read_text()] == [
        "baton/system/secret.py"
    ]


@pytest.mark.parametrize("module", ["cluster", "worker.process"])
def test_a_worker_needs_no_ray(module: str) -> None:
    """GPU machines without Ray start workers as plain processes."""
    program = f"import sys; sys.modules['ray'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_the_simulator_needs_neither_carriers_nor_devices() -> None:
    names = [relative(file).removesuffix(".py").replace("/", ".") for file in modules("simulator")]
    absent = ["torch", "triton", "ray", "grpc", "zmq", "fastapi", "starlette", "uvicorn"]
    program = f"import importlib, sys; sys.modules.update(dict.fromkeys({absent}))\n"
    program += f"for name in {names}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_what_computes_needs_no_carrier_and_no_grammar() -> None:
    """Kernels, models and the engine's core are tested on machines that have PyTorch and Triton, and little else."""
    pytest.importorskip("triton")
    planes = ("engine/executor.py", "engine/build.py", "engine/ranks/")
    names = [
        relative(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in modules("engine")
        if not relative(file).startswith(planes)
    ]
    absent = ["zmq", "llguidance", "grpc", "fastapi", "starlette", "uvicorn", "ray"]
    program = f"import importlib, sys; sys.modules.update(dict.fromkeys({absent}))\n"
    program += f"for name in {names}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_readme_names_every_package_and_section() -> None:
    from baton.config import BatonConfig

    readme = (ROOT / "README.md").read_text()
    assert [name for name in PACKAGES if f"`{name}/`" not in readme] == []
    assert [section for section in BatonConfig.model_fields if f"| `{section}` |" not in readme] == []


def test_readme_configuration_is_valid() -> None:
    import yaml

    from baton.config import BatonConfig

    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    BatonConfig.from_mapping(yaml.safe_load(block), "README.md")


def test_make_targets_of_the_documents_exist() -> None:
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= defined, f"{document} names targets that do not exist: {named - defined}"


@pytest.mark.parametrize(("config", "arguments"), [("", []), ("my config.yaml", ["my config.yaml"])])
def test_make_serve_passes_its_configuration_as_one_argument(config: str, arguments: list[str]) -> None:
    options = ["--dry-run", "--no-print-directory", "--old-file=.venv/.installed"]
    command = ["make", *options, "serve", f"CONFIG={config}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shlex.split(printed.splitlines()[-1]) == [".venv/bin/baton", "serve", *arguments]


def test_http_clients_of_tests_are_patient() -> None:
    """The default timeout of an HTTP client is five seconds. A test that exceeds it shows that the machine is
    busy, not that the code is wrong."""
    hasty = [
        f"{relative(file)}:{node.lineno}"
        for file in modules("tests")
        if "httpx2" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"httpx2.AsyncClient", "httpx2.Client"}
        and not {"timeout", "transport"} & {keyword.arg for keyword in node.keywords}
    ]
    assert hasty == []
