"""What the end-to-end tests share: the real small model."""

import os
from pathlib import Path

import pytest

from engine.loading.pretrained import default_cache_dir, resolve


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve("smollm2", default_cache_dir(os.environ))
