"""no_room: which errors come with a remedy."""

import threading

import pytest

from baton.system.no_room import REMEDY, in_words


def test_pythons_error_without_a_free_thread_has_a_remedy() -> None:
    try:
        threading.stack_size(2**47)  # more than any address space has: the system refuses the thread
        with pytest.raises(RuntimeError) as caught:
            threading.Thread(target=int).start()
    finally:
        threading.stack_size(0)
    assert in_words(caught.value) == f"RuntimeError: can't start new thread; {REMEDY}"


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 do not fit"), OSError(28, "No space left")])
def test_other_errors_have_none(error: Exception) -> None:
    assert in_words(error) == f"{type(error).__name__}: {error}"
