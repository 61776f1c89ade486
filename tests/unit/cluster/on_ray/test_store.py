"""Which command owns a fleet, and what of a fleet stays in Ray's store; the store and Ray's jobs are replaced."""

import pytest

from cluster.on_ray.store import RayStore
from tests.factories.ray_store import FakeRayStore

ONE, OTHER, THIRD = "01000000", "02000000", "03000000"


@pytest.fixture
def ray_store(monkeypatch: pytest.MonkeyPatch) -> FakeRayStore:
    return FakeRayStore(monkeypatch)


def claim(ray_store: FakeRayStore, job: str, fleet: str = "0a0a0a0a") -> str | None:
    ray_store.act_as(job)
    return RayStore("blue", fleet).claim()


def test_a_fleet_has_one_owner_until_the_job_of_its_command_ends(ray_store: FakeRayStore) -> None:
    assert claim(ray_store, ONE) is None
    assert claim(ray_store, ONE) is None
    assert claim(ray_store, OTHER) == "process 701 on 10.0.0.1"
    ray_store.running.remove(ONE)
    assert claim(ray_store, OTHER) is None
    assert claim(ray_store, THIRD) == claim(ray_store, ONE) == "process 702 on 10.0.0.1"
    assert claim(ray_store, THIRD, fleet="0b0b0b0b") is None


@pytest.mark.parametrize("before", ["list", "jobs", "put"])
@pytest.mark.parametrize("has_former", [False, True])
def test_of_two_commands_that_find_no_owner_at_the_same_time_one_becomes_it(
    ray_store: FakeRayStore, has_former: bool, before: str
) -> None:
    """The other command has just joined Ray, so its job is new, too."""
    if has_former:
        claim(ray_store, THIRD)
        ray_store.running.remove(THIRD)

    def newcomer_is_faster() -> None:
        ray_store.running.append("04000000")
        assert claim(ray_store, "04000000") is None
        ray_store.act_as(ONE)

    ray_store.before = {before: newcomer_is_faster}
    assert claim(ray_store, ONE) in ("process 704 on 10.0.0.1", "Ray job 04000000")
    assert ray_store.before == {}
    assert claim(ray_store, "04000000") is None


def test_the_next_fleet_of_the_name_finds_nothing_of_the_former_and_keeps_its_own(
    ray_store: FakeRayStore,
) -> None:
    former, present = RayStore("blue", "0a0a0a0a"), RayStore("blue", "0b0b0b0b")
    another = RayStore("green", "0a0a0a0a")
    for store in (former, present, another):
        store.save(b"desired")
        assert store.claim() is None
    present.clear_others()
    assert former.load() is None
    assert (present.load(), another.load()) == (b"desired", b"desired")
    assert len(ray_store.content) == 4, "both kept fleets have their desired state and a claim"
    present.clear()
    another.clear()
    assert ray_store.content == {}
