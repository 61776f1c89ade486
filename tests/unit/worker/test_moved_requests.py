"""Requests that come with output which others sampled, as an engine takes them."""

import pytest

from baton.errors import InvalidRequest
from tests.factories.engine import VOCAB_SIZE, make_core, make_engine_request
from tests.factories.scheduling import token_at


def test_c52_an_engine_goes_on_behind_what_a_request_came_with() -> None:
    core = make_core()
    given = tuple(token_at("r", position) for position in range(5))
    core.add_request(make_engine_request("r", max_tokens=8, output_token_ids=given), "gateway")
    outputs = [output for _ in range(6) for output in core.step().get("gateway", [])]
    assert [output.first_position for output in outputs] == [5, 6, 7]
    assert [output.token_ids for output in outputs] == [(token_at("r", i),) for i in (5, 6, 7)]
    core.close()


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**32 - 1, 2**32])
def test_tokens_that_the_model_does_not_know_are_refused_before_they_fail_everybodys_step(wrong: int) -> None:
    core = make_core()
    complaint = rf"^{{}}: token ids must be 0 to {VOCAB_SIZE - 1}, got {wrong}$"
    request = make_engine_request("r", output_token_ids=(7, wrong, 8))
    with pytest.raises(InvalidRequest, match=complaint.format("output_token_ids")):
        core.add_request(request, "gateway")
    prompt = make_engine_request("r", prompt_token_ids=(7, wrong))
    with pytest.raises(InvalidRequest, match=complaint.format("prompt")):
        core.add_request(prompt, "gateway")
    assert core.scheduler.request_counts().waiting == 0
    core.close()
