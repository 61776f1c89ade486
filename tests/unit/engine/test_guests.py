"""Guests: the same bits as without them; a worker that takes back its CPU waits for a small part of a call only."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.library import native_library
from tests.unit.engine.test_lent_cpus import HERE, NOWHERE, THERE, needs_two_cpus

pytestmark = [needs_two_cpus, pytest.mark.usefixtures("forked_workers")]

BORROWER = """
import ctypes, mmap, os, sys, threading, time
from pathlib import Path
import numpy as np
import torch
from engine.lent_cpus import LentCpus
from engine.layers.native_attention import NativeAttention
from engine.native.library import native_library
from tests.factories.attention_steps import MIXED, Heads, Layout, make_layout

folder, here, there, nowhere = sys.argv[1], *map(int, sys.argv[2:])
os.sched_setaffinity(0, {here})
torch.set_num_threads(1)
library = native_library()
lent = LentCpus(library, [here], [there, nowhere], "fleet", Path(folder))
[path] = Path(folder).iterdir()
with path.open("rb+") as file:
    table = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64).reshape(-1, 8)

def lend(is_lent: bool) -> None:
    table[there] = int(is_lent), *(0,) * 7  # the time, and the borrower

class Attention:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.native = NativeAttention(
            library, layout.pool, layout.architecture, layout.heads.num_heads, layout.qkv_TPD.dtype
        )
        self.plan()

    def plan(self) -> None:
        self.step = self.native.prepare(self.layout.batch)

    def compute(self) -> torch.Tensor:
        return self.step(0, self.layout.qkv_TPD.clone(), None).clone()

def borrowed_s() -> float:
    return lent.borrowed_s()
"""

SAME_BITS = """
layouts = [
    make_layout([(5000, 1), *MIXED, (3000, 40)], Heads(6, 2, 64), dtype, windows=(window,))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for window in (None, 700)
]
attentions = [Attention(layout) for layout in layouts]
alone = [attention.compute() for attention in attentions]
is_over = threading.Event()

def lend_now_and_then() -> None:
    while not is_over.wait(0.0002):
        lend(not table[there, 0])

lender = threading.Thread(target=lend_now_and_then, daemon=True)
lender.start()
deadline = time.monotonic() + 60.0
lent.begin_step()
num_compared = 0
while borrowed_s() < 0.05 or num_compared < 20:
    assert time.monotonic() < deadline, f"borrowed for {borrowed_s()} s"
    for attention, expected in zip(attentions, alone, strict=True):
        if num_compared % 2:
            attention.plan()
        assert torch.equal(attention.compute(), expected)
    num_compared += 1
is_over.set()
lender.join()
"""

SAME_PRODUCTS = """
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.native_linear import NativeLinear, NativeLinears
from engine.native.products import Products

products = Products(library)
weight_OI = torch.randn(768, 576)
firsts_N, order_P = torch.tensor([0, 1, 1, 200, 300]), torch.arange(300).flip(0) // 2
layers = [
    (NativeLinear.of_floats(products, weight_OI.to(dtype), None), dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
layers += [
    (NativeLinear.of_groups(products, GroupedWeight.quantize(weight_OI, bits), None), dtype)
    for bits in (4, 8)
    for dtype in (torch.float32, torch.bfloat16)
]

def results() -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = []
    for layer, dtype in layers:
        for num_rows in (1, 20, 300):
            x_TI, gated_TP = torch.randn(num_rows, 576).to(dtype), torch.empty(num_rows, 384, dtype=dtype)
            layer.gated(x_TI, gated_TP)
            found += [layer(x_TI), gated_TP]
        y_PO = torch.empty(300, 768, dtype=dtype)
        NativeLinears([layer] * 4).store(x_TI, firsts_N, order_P, y_PO)
        found.append(y_PO)
    return found

alone = results()
lend(True)
lent.begin_step()
deadline = time.monotonic() + 60.0
while borrowed_s() < 0.02:
    assert time.monotonic() < deadline, f"borrowed for {borrowed_s()} s"
    assert all(map(torch.equal, results(), alone))
"""

LEAVE = """
def expect_that_a_guest_leaves_half_of_the_work(compute) -> None:
    # Without guests, one thread computes both halves.
    alone = compute().clone()
    times = []
    for _ in range(4):
        begin = time.thread_time()  # a busy machine does not lengthen it
        compute()
        times.append(time.thread_time() - begin)
    half_s = min(times) / 2
    deadline = time.monotonic() + 60.0
    lent.begin_step()
    guest_s = 0.0
    while not half_s / 16 < guest_s < half_s / 3:  # if it is less, the guest found no work
        assert time.monotonic() < deadline, f"half the work takes {half_s} s, a guest computed for {guest_s} s"
        lend(True)
        threading.Timer(half_s / 8, lend, [False]).start()
        before = borrowed_s()
        assert torch.equal(compute(), alone)
        lend(False)
        guest_s = borrowed_s() - before
"""

LEAVE_AN_ITEM = """
# Two items: one for each kv head. Each visits all keys.
layout = make_layout([(8000, 96)], Heads(2, 2, 128), torch.float32, windows=(None,))
expect_that_a_guest_leaves_half_of_the_work(Attention(layout).compute)
"""

LEAVE_ROWS = """
from engine.activation import Gate
from engine.native.elementwise import ElementwiseKernels

kernels = ElementwiseKernels(library)
gate_up_TM, out_TI = torch.randn(1024, 16384), torch.empty(1024, 8192)

def compute() -> torch.Tensor:
    kernels.gate_mul(gate_up_TM, Gate.SILU, out_TI)
    return out_TI

expect_that_a_guest_leaves_half_of_the_work(compute)
"""


NO_GUEST = """
attention = Attention(make_layout(MIXED, Heads(6, 2, 64), torch.float32))
borrowers = []
for _ in range(2):
    table[nowhere] = 1, *(0,) * 7
    lent.begin_step()
    attention.compute()
    borrowers.append(int(table[nowhere, 1]))
    lent.end_step()
assert borrowers == [here + 1, 0]
"""


@pytest.mark.parametrize(
    "script",
    [SAME_BITS, SAME_PRODUCTS, LEAVE + LEAVE_AN_ITEM, LEAVE + LEAVE_ROWS, NO_GUEST],
    ids=["same bits", "same products", "leave an item", "leave rows", "no guest"],
)
def test_guests(script: str, tmp_path: Path) -> None:
    assert native_library() is not None
    command = (sys.executable, "-m", "tests.factories.code")
    subprocess.run(
        [*command, BORROWER + script, str(tmp_path), *map(str, (HERE, THERE, NOWHERE))],
        check=True,
    )
