"""What every test may rely on."""

import signal

# Started in the background, a shell's children ignore SIGINT, and so would every process that a test starts and
# interrupts. A handler of our own is not inherited: they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
