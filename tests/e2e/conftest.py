"""What the end-to-end tests share: the real small model."""

import os
from pathlib import Path

import pytest

from engine.loading.pretrained import default_cache_dir, resolve


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve("smollm2", default_cache_dir(os.environ))


@pytest.fixture(scope="module", autouse=True)
def _workers_are_forked(forked_workers: None) -> None:
    """A fleet for each test would import PyTorch a hundred times."""
