"""Which running fleet a command adopts, by its model."""

from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.system.curve import derive_keys
from cluster.control_api.configuration import keys_digest
from cluster.on_ray.controller import _differences
from tests.factories.control_api import StandingFleet, packed
from tests.factories.security import SECRET

COMMIT, OTHER = "a" * 40, "b" * 40


def folder(commit: str) -> Path:
    return Path("/cache/models--acme--tiny/snapshots") / commit


@pytest.mark.parametrize(
    ("there", "asked", "found", "differs"),
    [
        (f"acme/tiny@{COMMIT}", "acme/tiny", folder(COMMIT), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny", folder(OTHER), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny@main", folder(COMMIT), []),
        (f"acme/tiny@{COMMIT}", "acme/tiny@main", folder(OTHER), ["model.path"]),
        (f"acme/tiny@{COMMIT}", "acme/other", folder(OTHER), ["model.path"]),
        (f"acme/tiny@{COMMIT}", f"acme/tiny@{COMMIT}", Path("/another/home/snapshots") / COMMIT, []),
        ("/models/tiny", "models/tiny", Path("/models/tiny"), []),
        ("smollm2", "smollm2", Path("/elsewhere"), ["the model's folder"]),
    ],
)
async def test_a_fleet_is_adopted_if_it_serves_what_the_name_means(
    there: str, asked: str, found: Path, differs: list[str]
) -> None:
    """A commit is the same wherever its folder is, and a name without revision means the fleet's commit."""
    place = folder(COMMIT) if there.startswith("acme") else Path("/models/tiny")
    digest = keys_digest(derive_keys(SECRET))
    fleet = StandingFleet(packed(BatonConfig.from_mapping({"model": {"path": there}}), place))
    ours = BatonConfig.from_mapping({"model": {"path": asked}})
    lines = await _differences(fleet, ours, digest, found)  # type: ignore[arg-type]
    assert [line.partition(" is ")[0] for line in lines] == differs
