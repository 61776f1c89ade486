"""What the process keeps of its memory, and how much more there is."""

import os
import platform

from engine.allocator import available_memory, keep_freed_memory


def test_glibc_takes_the_settings() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert bytearray(50 * 2**20).count(0) == 50 * 2**20


def test_what_is_available_is_less_than_all_and_more_than_nothing() -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() < everything
