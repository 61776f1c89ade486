from gateway.call_ids import MAX_PARENT_CHARACTERS, CallIds, TraceContext, trace_context_from

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_states_are_joined_in_their_order() -> None:
    assert trace_context_from([PARENT], ["a=1, b=2", "", "c=3"]) == TraceContext(PARENT, "a=1,b=2,c=3")
    assert trace_context_from([PARENT], []) == TraceContext(PARENT, "")


def test_without_one_parent_there_is_no_trace() -> None:
    assert trace_context_from([], ["a=1"]) is None
    assert trace_context_from([""], []) is None
    assert trace_context_from([PARENT, PARENT], []) is None
    assert trace_context_from(["0" * (MAX_PARENT_CHARACTERS + 1)], []) is None


def test_a_state_that_is_too_long_loses_its_large_members_first_and_then_the_last_ones() -> None:
    large, small = "l=" + "x" * 300, "s=" + "x" * 98
    kept = trace_context_from([PARENT], [f"{large},{small}"])
    assert kept == TraceContext(PARENT, f"{large},{small}")
    kept = trace_context_from([PARENT], [",".join([large, small, small, small])])
    assert kept == TraceContext(PARENT, ",".join([small] * 3))
    kept = trace_context_from([PARENT], [",".join([small] * 9)])
    assert kept == TraceContext(PARENT, ",".join([small] * 5))


def test_more_members_than_there_may_be_are_no_state() -> None:
    assert trace_context_from([PARENT], ["a=1," * 33]) == TraceContext(PARENT, "")


def test_ids_of_calls_stay_the_same_within_an_answer_and_differ_between_answers() -> None:
    one, other = CallIds(), CallIds()
    assert [one.of(0), one.of(1)] == [one.of(0), one.of(1)]
    assert len({ids.of(index) for ids in (one, other) for index in range(10)}) == 20
    assert one.of(0, "toolu_") == "toolu_" + one.of(0).removeprefix("call_")
