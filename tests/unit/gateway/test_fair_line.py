"""FairLine: callers take turns by what their items cost, and no caller saves up or is held to what is long over."""

from gateway.fair_line import FairLine


def line_of(waiting: dict[str, int]) -> FairLine[str]:
    line = FairLine[str]()
    for caller, number in waiting.items():
        for index in range(number):
            line.add(caller, f"{caller}{index}")
    return line


def taken(line: FairLine[str], number: int, costs: dict[str, float]) -> str:
    """The callers of the next items, each charged as it is taken."""
    callers = []
    for _ in range(number):
        item = line.take()
        assert item is not None
        callers.append(item[0])
        line.charge(item[0], costs.get(item[0], 1.0))
    return "".join(callers)


def test_c57_callers_take_turns_by_cost_however_many_items_they_have() -> None:
    line = line_of({"a": 100, "b": 3, "c": 3})
    assert taken(line, 12, {"a": 3.0}) == "abcbcbcaaaaa"


def test_c57_a_caller_that_joins_begins_with_the_others() -> None:
    line = line_of({"a": 10})
    assert taken(line, 5, {}) == "aaaaa"
    for index in range(5):
        line.add("b", f"b{index}")
    assert taken(line, 6, {}) == "bababa", "it neither waits for what came before nor catches up with it"


def test_c57_a_cost_that_is_known_late_counts_all_the_same() -> None:
    line = line_of({"a": 3, "b": 3})
    assert line.take() == "a0"
    line.discard("b", "b2")
    line.charge("a", 10.0)
    assert taken(line, 4, {}) == "bbaa"


def test_c57_once_nothing_waits_all_callers_are_even() -> None:
    line = line_of({"a": 1})
    assert taken(line, 1, {"a": 99.0}) == "a"
    assert line.take() is None
    line.add("b", "b0")
    line.add("a", "a1")
    line.add("b", "b1")
    assert taken(line, 3, {}) == "bab"


def test_callers_that_may_not_have_a_turn_wait_and_lose_nothing() -> None:
    line = line_of({"a": 2, "b": 2})
    assert line.take(lambda caller: caller == "b") == "b0"
    assert line.take(lambda caller: caller == "c") is None
    assert [line.take(), len(line)] == ["a0", 2]


def test_the_latest_item_of_the_largest_caller_is_the_first_to_go() -> None:
    line = line_of({"a": 2, "b": 3, "c": 3})
    assert line.last_of_largest() == ("c", "c2")
    line.discard("c", "c2")
    assert line.last_of_largest() == ("b", "b2")
    assert FairLine[str]().last_of_largest() is None
