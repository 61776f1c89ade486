"""Where kernels run: on the GPU if there is one, else in Triton's interpreter on the CPU (tests/conftest.py)."""

from collections.abc import Iterator

import pytest
import torch

MAX_CACHED_BYTES = 2**30
"""Device memory that a process may keep between tests; several processes share a device."""

collect_ignore_glob: list[str] = []
try:
    import triton
except ModuleNotFoundError:
    collect_ignore_glob.append("test_*.py")
else:
    if triton.knobs.runtime.interpret:
        from tests.factories import fast_interpreter  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes",
        choices=("few", "many"),
        default="few",
        help="of test_many_shapes.py: `many` are those of real models, for a GPU",
    )


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of the CPU, so that inputs are equal wherever the kernel runs."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    """Returns a test's memory, so that other processes can take it."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MAX_CACHED_BYTES:
        torch.cuda.empty_cache()
