"""Which tests may run at the same time, where pytest-xdist runs them in two processes (`make test`)."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

STARTS_RAY = (
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_node_loss.py",
    "tests/integration/test_cluster_",
    "tests/integration/test_fleet_on_ray.py",
)


class ByFile(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """A file's tests, which share what they start, run one after another; so do all that start a Ray.

    Two of those at once would each take what the other leaves in shared memory for their own. Files begin in the order
    in which they were collected: whole clusters come first, and many small tests fill what is left.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(STARTS_RAY) else str(super()._split_scope(nodeid))
