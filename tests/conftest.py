"""What every test may rely on."""

import asyncio
import atexit
import gc
import inspect
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from baton.system.logs import PACKAGES
from baton.system.secret import SECRET_VARIABLE
from tests.factories.fork_server import ForkServer, forks_workers
from tests.factories.security import SECRET

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

    from gateway.text import Tokenizer
    from tests.factories.whole_engines import EnginesOf

# A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts. Child
# processes do not inherit a handler of our own: they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Clusters that tests start share a secret of their own instead of making one in the user's home.
os.environ[SECRET_VARIABLE] = SECRET.text

# The servers of tests are on this machine, which a proxy does not reach.
for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[variable]

# Threads make the products of tests slower, above all beside other tests. PyTorch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

# Where no GPU is, kernels are interpreted. Read when a kernel is declared, so before any test imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes is no property of the code, least of all on a busy machine. Each run draws others.
hypothesis.settings.register_profile("baton", deadline=None, max_examples=40)
hypothesis.settings.load_profile("baton")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model as `make_model_dir` makes one by default. Read-only: all tests share the folder."""
    from tests.factories.models import (
        make_model_dir,  # transformers takes seconds to import, and few tests need a model
    )

    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> "Tokenizer":
    """A small tokenizer as `make_tokenizer_dir` makes one by default, with a chat template. Tests do not change it."""
    from gateway.text import Tokenizer
    from tests.factories.models import make_tokenizer_dir

    return Tokenizer(make_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engines(folder: Path) -> Iterator["EnginesOf"]:
    """Whole engines with that model; a test starts them."""
    from tests.factories.whole_engines import EnginesOf

    with EnginesOf(folder) as engines:
        yield engines


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def forked_workers(fork_server: ForkServer) -> Iterator[None]:
    """Workers and ranks that this process starts are forks, which have nothing to import."""
    with forks_workers(fork_server):
        yield


@pytest.fixture(autouse=True)
def _log_levels_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets the log levels of the whole process."""
    levels = {logger: logger.level for logger in map(logging.getLogger, PACKAGES)}
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


TEST_TIMEOUT_S = 120.0
"""Ends coroutine tests that hang."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), TEST_TIMEOUT_S))
    return True


STARTS_RAY = (
    "tests/integration/test_cluster_placement.py",
    "tests/integration/test_cluster_security.py",
    "tests/integration/test_cluster_serve.py",
    "tests/integration/test_fleet_on_ray.py",
    "tests/integration/test_gateways_on_ray.py",
)
"""Together longer than anything that runs beside them, so that they come first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(STARTS_RAY))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects thousands of tests without searches for garbage: they leave none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keeps what a file leaves, such as modules and caches, out of later searches for garbage."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# Extension modules expect their objects to be freed when everything has ended. This must not come earlier, since pytest
# itself looks for garbage at its end, again and again.
atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Scheduling":
    from tests.by_file import ByFile  # tests that run one after another do not need pytest-xdist

    return ByFile(config, log)
