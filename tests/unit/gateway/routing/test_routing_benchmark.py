"""The routing benchmark in small: what its tables say must be so, and is the same each time."""

from functools import cache

from benchmarks.routing import Case, play
from simulator.timed_fleet import Result
from simulator.workloads import conversations, strangers

CONVERSATIONS = Case("conversations", (3, 3), conversations(1, 30, 60.0, scale=0.1), (512, 512))
STRANGERS = Case("strangers", (3, 3), strangers(1, 60, 100.0, scale=0.1), (512, 512))
FEW_BLOCKS = Case("few blocks", (2, 2), conversations(1, 40, 120.0, scale=0.1), (512, 40))


@cache
def played(case_name: str, policy: str, mode: str = "disaggregated") -> Result:
    case = next(each for each in (CONVERSATIONS, STRANGERS, FEW_BLOCKS) if each.name == case_name)
    return play(case, policy, routing_mode=mode)


def test_kv_aware_finds_more_than_the_others_where_there_is_something_to_find() -> None:
    rates = {
        policy: played("conversations", policy).hit_rate
        for policy in ("round_robin", "least_loaded", "kv_aware")
    }
    assert rates["kv_aware"] > 1.15 * max(rates["round_robin"], rates["least_loaded"])
    assert played("conversations", "kv_aware", "auto").hit_rate > rates["least_loaded"]
    assert (
        played("conversations", "kv_aware").num_transfer_tokens
        < played("conversations", "least_loaded").num_transfer_tokens
    )


def test_without_shared_prefixes_nothing_is_found() -> None:
    assert played("strangers", "kv_aware").num_hit_tokens == 0


def test_every_request_is_answered_where_blocks_are_few_and_none_is_prefilled_in_vain() -> None:
    """This holds although reports are up to half a second old. Without credits, 35 requests are prefilled in vain."""
    for policy in ("least_loaded", "kv_aware"):
        result = played("few blocks", policy)
        assert len(result.ttft_s) == sum(len(session.turns) for session in FEW_BLOCKS.sessions)
        assert result.num_waited > 20
        assert result.num_in_vain == 0


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, second = (play(CONVERSATIONS, "kv_aware") for _ in range(2))
    assert (first.ttft_s, first.itl_s, first.num_hit_tokens) == (
        second.ttft_s,
        second.itl_s,
        second.num_hit_tokens,
    )
