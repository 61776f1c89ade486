"""The instructions and the resources of compiled kernels, as NVIDIA's tools read them."""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TIMEOUT_S = 60
SECTION = struct.Struct("<IIQQQQ")
"""The first fields of an ELF section's header: name, type, flags, address, offset, size."""


def resource_usage(cubin: bytes) -> dict[str, int]:
    text = _dumped(["cuobjdump", "--dump-resource-usage"], cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def instructions(cubins: Sequence[bytes], arch: int) -> list[list[str]]:
    """The assembler's names of each kernel's instructions, in order.

    All code is read at once: the tool takes longer to start, and to skip the lines of the source, than to
    read a kernel.
    """
    codes = [_code(cubin) for cubin in cubins]
    starts = [0, *accumulate(map(len, codes))]
    machine = f"SM{arch}a" if arch >= 90 else f"SM{arch}"
    text = _dumped(["nvdisasm", "--no-dataflow", "--binary", machine], b"".join(codes)) if codes else ""
    names: list[list[str]] = [[] for _ in codes]
    line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w+)"
    for address, name in re.findall(line, text, re.MULTILINE):
        names[bisect_right(starts, int(address, 16)) - 1].append(name)
    assert all(names)
    return names


def _code(cubin: bytes) -> bytes:
    """The code of the only kernel in the file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, index_of_names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [SECTION.unpack_from(cubin, table + size * index) for index in range(count)]
    names = headers[index_of_names][4]
    (code,) = (
        cubin[offset : offset + num_bytes]
        for name, _, _, _, offset, num_bytes in headers
        if cubin.startswith(b".text.", names + name)
    )
    return code


def _dumped(command: Sequence[str], content: bytes) -> str:
    tool, *options = command
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run(
            [str(TOOLS / tool), *options, file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        ).stdout
