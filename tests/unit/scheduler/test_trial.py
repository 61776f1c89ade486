"""Whose turn it is, and when a turn ends."""

from scheduler.trial import Trial


def test_a_turn_lasts_until_all_of_the_group_have_passed_or_no_other_finds_room() -> None:
    trial = Trial()
    assert trial.step_failed(dict.fromkeys("abcd", 9), 5, was_alone=False) is None
    assert trial.group == {"a", "b"}
    assert not trial.step_computed(4, {"a": 9, "b": 9}, 6), "planned before the turn"
    assert not trial.step_computed(5, {"a": 9, "b": 8}, 7)
    assert trial.group == {"b"}, "one token is still missing"
    assert trial.step_computed(6, {}, 8), "no room for it beside the other"
    assert trial.group == {"c", "d"}
    assert not trial.step_computed(7, {"b": 9}, 9), "planned before the turn"
    assert trial.step_computed(8, {"c": 9, "d": 9}, 9)
    assert trial.group == {"b"}
    assert not trial.step_computed(9, {}, 10), "it finds no room at all, so it need not be tried"
    assert trial.group is None


def test_a_request_whose_step_had_others_that_have_ended_has_the_first_turn() -> None:
    trial = Trial()
    assert trial.step_failed({"a": 9}, 5, was_alone=False) is None
    assert trial.group == {"a"}


def test_another_trial_knows_of_no_request_that_has_passed() -> None:
    trial = Trial()
    trial.step_failed(dict.fromkeys("ab", 9), 5, was_alone=False)
    trial.step_computed(5, {"a": 9}, 6)
    trial.step_computed(6, {"b": 9}, 7)
    have_passed = [trial.has_passed]
    trial.step_failed(dict.fromkeys("ab", 9), 8, was_alone=False)
    have_passed.append(trial.has_passed)
    assert have_passed == [True, False]
