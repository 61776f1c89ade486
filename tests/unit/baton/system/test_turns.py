"""FairTurns: whose entry is next, by what each caller has spent."""

from baton.system.turns import FairTurns


def served(turns: FairTurns[str, str], costs: dict[str, float], count: int = 100) -> str:
    order = ""
    while count and (turn := turns.take_next()) is not None:
        order, count = order + turn[1], count - 1
        turns.charge(turn[0], costs.get(turn[0], 1.0))
    return order


def filled(**entries: str) -> FairTurns[str, str]:
    turns = FairTurns[str, str]()
    for caller, own in entries.items():
        for entry in own:
            turns.add(caller, entry)
    return turns


def test_c57_callers_share_by_cost_and_one_callers_entries_keep_their_order() -> None:
    assert served(filled(one="abc", two="xyz"), {}) == "axbycz"
    assert served(filled(dear="abc", cheap="wxyz"), {"dear": 3.0}) == "awxybzc"


def test_c57_a_new_caller_waits_for_one_entry_and_an_idle_one_has_saved_nothing_up() -> None:
    turns = filled(one="abcdefgh", idle="i")
    assert served(turns, {}, 4) == "aibc"
    turns.add("idle", "j")
    turns.add("idle", "k")
    turns.add("new", "x")
    assert served(turns, {}, 4) == "jxdk"


def test_all_are_even_again_once_nothing_waits() -> None:
    turns = filled(one="a")
    assert served(turns, {"one": 100.0}) == "a"
    for caller, entry in (("one", "b"), ("two", "x"), ("one", "c")):
        turns.add(caller, entry)
    assert served(turns, {}) == "bxc"


def test_c57_a_cost_that_is_known_late_counts_all_the_same() -> None:
    turns = filled(one="abc", two="xy")
    assert turns.take_next() == ("one", "a")
    turns.charge("one", 10.0)
    assert served(turns, {}) == "xybc"


def test_callers_that_may_not_have_a_turn_wait_and_lose_nothing() -> None:
    turns = filled(one="ab", two="xy")
    assert turns.take_next(lambda caller: caller == "two") == ("two", "x")
    assert turns.take_next(lambda caller: caller == "three") is None
    assert (turns.take_next(), len(turns)) == (("one", "a"), 2)


def test_the_latest_entry_of_the_caller_with_most_of_them_makes_room() -> None:
    turns = filled(one="ab", two="xy", three="p")
    assert turns.last_of_largest() == ("two", "y")
    turns.discard("two", "y")
    turns.discard("two", "y")
    turns.add("one", "b")  # waits already
    assert (turns.last_of_largest(), len(turns)) == (("one", "b"), 4)
    assert FairTurns[str, str]().last_of_largest() is None
