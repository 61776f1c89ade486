"""PackedLogprobs hold the log-probabilities of a long prompt as columns."""

import random

import pytest

from baton.errors import WireError
from baton.messages.request_plane import TO_GATEWAY, Outputs
from baton.request import PackedLogprobs, RequestOutput, TokenLogprobs


def positions_of(number: int, num_top: int) -> list[TokenLogprobs]:
    rng = random.Random(number)

    def likely() -> tuple[int, float]:
        return rng.randrange(2**18), -rng.randrange(1000) / 64

    return [
        TokenLogprobs(*likely(), rng.randrange(2**18), tuple(likely() for _ in range(num_top)))
        for _ in range(number)
    ]


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("number", [0, 1, 300])
def test_they_are_the_positions_that_were_packed(number: int, num_top: int) -> None:
    positions = positions_of(number, num_top)
    packed = PackedLogprobs.of(positions)
    assert ([*packed], len(packed)) == (positions, number)
    for at in (0, 1, 128, 299, 300, 1000):
        assert ([*packed[:at]], [*packed[at:]]) == (positions[:at], positions[at:])
        assert packed[:at] + packed[at:] == packed
    assert [*packed[1:7]] == positions[1:7]


def test_the_most_of_one_prompt_are_a_small_message() -> None:
    """With one object for each position, the log-probabilities would occupy a gateway's event loop for a second."""
    packed = PackedLogprobs(bytes(2**20), bytes(2**20), bytes(2**20))
    output = RequestOutput(request_id="r", first_position=0, token_ids=(1,), prompt_logprobs=packed)
    data = TO_GATEWAY.encode(Outputs((output,)))
    assert len(data) < 3 * 2**20 + 100
    assert TO_GATEWAY.decode(data) == Outputs((output,))


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "ranks"),
    [(4, 8, 4), (4, 4, 0), (0, 0, 4), (12, 12, 8), (6, 6, 3), (0, 4, 0), (3, 3, 3)],
)
def test_columns_that_do_not_fit_are_no_message(token_ids: int, logprobs: int, ranks: int) -> None:
    with pytest.raises(WireError, match="are not columns of one table"):
        PackedLogprobs(bytes(token_ids), bytes(logprobs), bytes(ranks))
