"""Attention with lent CPUs: the same bits as without; a worker that takes back its CPU does not wait for an item."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.library import native_library
from tests.unit.engine.test_lent_cpus import HERE, THERE, needs_two_cpus

pytestmark = needs_two_cpus

BORROWER = """
import ctypes, mmap, os, sys, threading, time
from pathlib import Path
import numpy as np
import torch
from engine.lent_cpus import LentCpus
from engine.layers.native_attention import NativeAttention
from engine.native.library import native_library
from tests.factories.attention_steps import MIXED, Heads, Layout, make_layout

folder, here, there = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.sched_setaffinity(0, {here})
torch.set_num_threads(1)
library = native_library()
lent = LentCpus(library, [here], [there], "fleet", Path(folder))
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

SHORT_WAIT = """
# Two items: one for each kv head. Each visits all keys.
attention = Attention(make_layout([(8000, 96)], Heads(2, 2, 128), torch.float32, windows=(None,)))
times = []
for _ in range(4):
    begin = time.thread_time()  # a busy machine does not lengthen it
    alone = attention.compute()
    times.append(time.thread_time() - begin)
item_s = min(times) / 2
deadline = time.monotonic() + 60.0
lent.begin_step()
guest_s = item_s
while not item_s / 16 < guest_s < item_s / 2:  # if it is less, the guest found no item
    assert time.monotonic() < deadline, f"an item takes {item_s} s, a guest computed for {guest_s} s"
    lend(True)
    threading.Timer(item_s / 8, lend, [False]).start()
    before = borrowed_s()
    assert torch.equal(attention.compute(), alone)
    lend(False)
    guest_s = borrowed_s() - before
"""


@pytest.mark.parametrize("script", [SAME_BITS, SHORT_WAIT], ids=["same bits", "short wait"])
def test_guests_change_no_bit_and_leave_within_an_item(script: str, tmp_path: Path) -> None:
    assert native_library() is not None
    subprocess.run(
        [sys.executable, "-c", BORROWER + script, str(tmp_path), str(HERE), str(THERE)], check=True
    )
