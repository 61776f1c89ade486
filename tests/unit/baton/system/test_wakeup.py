"""WakeUp: news set before or during a poll ends it, once cleared it is quiet again."""

import select
import signal
import threading

from baton.system.wakeup import WakeUp


def is_readable(wakeup: WakeUp, timeout_s: float = 0.0) -> bool:
    return bool(select.select([wakeup], [], [], timeout_s)[0])


def test_set_is_seen_until_cleared() -> None:
    wakeup = WakeUp()
    assert not is_readable(wakeup)
    for _ in range(10_000):  # more than any socket buffer holds
        wakeup.set()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.close()


def test_another_thread_ends_a_poll() -> None:
    wakeup = WakeUp()
    thread = threading.Thread(target=wakeup.set)
    thread.start()
    assert is_readable(wakeup, timeout_s=10.0)
    thread.join()
    wakeup.close()


def test_setting_after_close_does_nothing() -> None:
    wakeup = WakeUp()
    wakeup.close()
    wakeup.set()


def test_a_signal_sets_it_without_its_handler() -> None:
    """The handler runs later, if the signal comes right before the main thread waits."""
    wakeup = WakeUp()
    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        wakeup.set_by_signals()
        signal.raise_signal(signal.SIGUSR1)
        assert is_readable(wakeup)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, former)
        wakeup.close()
