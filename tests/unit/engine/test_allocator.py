"""keep_freed_memory: on glibc it takes effect, and memory still works."""

import platform

from engine.allocator import keep_freed_memory


def test_glibc_takes_the_settings() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert bytearray(50 * 2**20).count(0) == 50 * 2**20
