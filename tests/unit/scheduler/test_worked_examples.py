"""The classic pictures of continuous batching and chunked prefill, step by step under the unified policy."""

from tests.factories.driving import Driver
from tests.factories.scheduling import make_request, make_scheduler


def test_requests_at_different_stages_share_a_batch_and_a_slot_is_taken_as_soon_as_it_is_free() -> None:
    driver = Driver(make_scheduler(max_num_seqs=3))
    arrivals = {
        0: make_request(512, request_id="A", max_tokens=5),
        1: make_request(256, request_id="B", max_tokens=50),
        3: make_request(128, request_id="C", max_tokens=50),
        4: make_request(200, request_id="D", max_tokens=50),
    }
    steps = []
    for t in range(7):
        if t in arrivals:
            driver.add(arrivals[t])
        steps.append(dict(driver.step().num_scheduled_tokens))
    assert steps == [
        {"A": 512},
        {"A": 1, "B": 256},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1, "C": 128},
        {"A": 1, "B": 1, "C": 1},  # A ends; D has waited for a slot
        {"B": 1, "C": 1, "D": 200},
        {"B": 1, "C": 1, "D": 1},
    ]


def test_of_three_requests_the_third_gets_what_is_left_of_the_budget_and_its_rest_beside_their_decodes() -> (
    None
):
    driver = Driver(make_scheduler(max_num_batched_tokens=10))
    for name, num_tokens in (("R1", 3), ("R2", 5), ("R3", 12)):
        driver.add(make_request(num_tokens, request_id=name, max_tokens=4))
    steps = [dict(driver.step().num_scheduled_tokens) for _ in range(4)]
    assert steps == [
        {"R1": 3, "R2": 5, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 8},
        {"R1": 1, "R2": 1, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 1},
    ]


def test_a_long_prompt_goes_in_chunks_beside_decodes_and_other_prompts() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=1502, num_blocks=400))
    b, c = (make_request(10, request_id=name, max_tokens=50) for name in ("B", "C"))
    driver.add(b, c)
    driver.step()
    driver.add(make_request(2000, request_id="A"), make_request(2000, request_id="D"))
    steps = [dict(driver.step().num_scheduled_tokens) for _ in range(4)]
    assert steps == [
        {"B": 1, "C": 1, "A": 1500},
        {"B": 1, "C": 1, "A": 500, "D": 1000},
        {"B": 1, "C": 1, "A": 1, "D": 1000},
        {"B": 1, "C": 1, "A": 1, "D": 1},
    ]
