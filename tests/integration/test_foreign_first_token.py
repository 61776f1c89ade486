"""A hand-over whose first token is not in the vocabulary: the load fails, and no other request is affected."""

from typing import Any
from unittest.mock import patch

import pytest

from baton.kv import OnLoadFailure
from baton.request import EngineRequest, ErrorKind, FinishReason, FirstToken
from baton.sampling import SamplingParams
from kv_transfer.protocol import producer as module
from kv_transfer.protocol.messages import End
from tests.factories.whole_engines import EnginesOf, hand_over


def request(request_id: str, num_tokens: int) -> EngineRequest:
    sampling_params = SamplingParams(max_tokens=6, temperature=0.0)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(5, 5 + num_tokens)),
        sampling_params=sampling_params,
    )


@pytest.mark.slow
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**63 - 1])
@pytest.mark.parametrize("on_failure", OnLoadFailure)
def test_no_answer_begins_with_it(engines: EnginesOf, token_id: int, on_failure: OnLoadFailure) -> None:
    def lie(key: Any, version: int, num_pieces: int, first_token: FirstToken) -> End:
        return End(key, version, num_pieces, FirstToken(token_id, None))

    prefill, decode, alone = engines.start("p"), engines.start("d"), engines.start("alone")
    alone.add(request("r", 40))
    decode.add(request("neighbour", 8))
    with patch.object(module, "End", lie):
        hand_over(prefill, decode, request("r", 40), on_failure)
        engines.run()
    answer, right = decode.answers["r"], alone.answers["r"].token_ids
    if on_failure is OnLoadFailure.RECOMPUTE:
        assert answer.token_ids == right
    else:
        assert answer.end is not None
        assert (answer.finish_reason, answer.end.error_kind) == (FinishReason.ERROR, ErrorKind.KV_LOAD_FAILED)
        assert f"sampled token {token_id}, which is not in the vocabulary" in str(answer.end.error)
    assert decode.answers["neighbour"].finish_reason is FinishReason.LENGTH
