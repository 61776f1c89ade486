"""copy_runs.ptx is assembled for every architecture, and leaves a step's kernels most of a multiprocessor."""

import re
import subprocess
from pathlib import Path

import pytest
from triton.backends.nvidia.compiler import get_ptxas

import kv_transfer.cuda
from kv_transfer.cuda.copy_kernel import NAME, NUM_THREADS, TABLE_WORDS

PTX = Path(kv_transfer.cuda.__file__).with_name(f"{NAME}.ptx")


@pytest.mark.parametrize("capability", [70, 80, 90, 100, 120])
def test_it_uses_no_stack_and_fewer_than_half_of_the_registers(capability: int, tmp_path: Path) -> None:
    ptxas = get_ptxas(capability).path
    command = [ptxas, "-v", f"-arch=sm_{capability}", str(PTX), "-o", str(tmp_path / "cubin")]
    assembled = subprocess.run(command, capture_output=True, text=True, check=True)
    said = assembled.stdout + assembled.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    num_registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    assert num_registers * NUM_THREADS < 65536 / 2


def test_its_table_is_as_long_as_the_one_that_is_made() -> None:
    assert f"table[{8 * TABLE_WORDS}]" in PTX.read_text()
