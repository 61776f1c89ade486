"""What every test may rely on."""

import os
import signal

import hypothesis

from cluster.secret import SECRET_VARIABLE
from tests.factories.security import SECRET

# Started in the background, a shell's children ignore SIGINT, and so would every process that a test starts and
# interrupts. A handler of our own is not inherited: they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Clusters that tests start share a secret of their own instead of making one in the user's home.
os.environ[SECRET_VARIABLE] = SECRET.text

# How long an example takes is no property of the code, least of all on a busy machine.
hypothesis.settings.register_profile("baton", deadline=None)
hypothesis.settings.load_profile("baton")
