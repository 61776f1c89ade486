"""On PYTHONPATH, makes every Python process hang on SIGUSR2: from then on no step of a worker's engine ends.

This is for workers that a test does not start itself, such as Ray's. All other threads continue, so
heartbeats continue.
"""

import signal
import threading


def wait_for_signal() -> None:
    signal.sigwait({signal.SIGUSR2})
    from tests.factories.sabotage import hang

    hang()


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # in all threads, since they inherit the mask
threading.Thread(target=wait_for_signal, name="hang on signal", daemon=True).start()
