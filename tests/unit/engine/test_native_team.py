"""Teams: each calling thread has its own, which computes every part once, however long its threads have waited."""

import ctypes
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.layers.native_linear import NativeLinear
from engine.native.library import native_library
from engine.native.products import Products

pytestmark = pytest.mark.skipif(
    native_library() is None or not Path("/proc/self/task").is_dir(), reason="needs a C++ compiler and Linux"
)

NUM_CALLERS, NUM_CALLS = 3, 150
LONGEST_PAUSE_S = 0.004
"""Threads stay awake for half as long."""


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_callers_get_their_results_and_take_their_threads_with_them() -> None:
    products = Products(cast("ctypes.CDLL", native_library()))
    layer = NativeLinear.of_floats(products, torch.randn(200, 64), None)
    x_TI = torch.randn(40, 64)
    torch.set_num_threads(1)
    expected_TO = layer(x_TI)
    meet = threading.Barrier(NUM_CALLERS)

    def call(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(NUM_CALLS):
            torch.set_num_threads(rng.randint(1, 4))
            num_rows = rng.randint(1, len(x_TI))
            assert torch.equal(layer(x_TI[:num_rows]), expected_TO[:num_rows])
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
        meet.wait()
        now = num_threads()
        meet.wait()
        return now

    before = num_threads()
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        found = list(callers.map(call, range(NUM_CALLERS)))
    assert found == [before + NUM_CALLERS * 4] * NUM_CALLERS
    deadline = time.monotonic() + 60.0
    while num_threads() != before:  # Python's threads end a little after they are joined
        assert time.monotonic() < deadline
        time.sleep(0.001)
