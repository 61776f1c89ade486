"""Which tests may run at the same time, where pytest-xdist runs them in several processes (`make test`)."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.conftest import STARTS_RAY


class ByFile(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """The tests of a file share what they start, so they run one after another. So do most tests that start a Ray.

    More of those at once would keep two cores so busy that a process takes a minute to start.
    Files begin in the order in which they were collected: whole clusters come first, and many small tests fill what is
    left.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(STARTS_RAY) else str(super()._split_scope(nodeid))
