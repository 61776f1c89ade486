"""Timers against a dictionary that is searched."""

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.protocol.timers import Timers

Keys = st.integers(0, 4)
Steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), Keys, st.integers(0, 20)),
        st.tuples(st.just("cancel"), Keys, st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(Steps)
def test_c34_every_deadline_comes_when_it_was_last_set_to_come(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    expected: dict[int, float] = {}
    for step, key, when in steps:
        if step == "set":
            timers.set(key, when)
            expected[key] = when
        elif step == "cancel":
            timers.cancel(key)
            expected.pop(key, None)
        else:
            due = sorted(time for time in expected.values() if time <= when)
            assert [expected.pop(key) for key in timers.pop_due(when)] == due
        assert timers.next() == min(expected.values(), default=None)


def test_putting_a_deadline_off_takes_no_memory() -> None:
    timers: Timers[str] = Timers()
    for now in range(10_000):
        timers.set("lease", now + 30.0)
        timers.set("other", 30_000.0 - now)
    assert len(timers._heap) <= 10_002
    for now in range(10_000):
        timers.set("lease", now + 30_000.0)
    assert len(timers._heap) <= 10_002
