"""A draft model changes no token: whole engines with one and without, over every way that a request can take."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest
from tests.factories.models import make_draft_pair
from tests.factories.speculation import (
    PLAIN,
    REPEATING,
    ROOMY,
    TIGHT,
    Answers,
    ask,
    assert_preempted_as,
    assert_rest,
    assert_same,
    assert_some_were_right_and_some_wrong,
    begun,
    num_drafts,
)
from tests.factories.whole_engines import EnginesOf, WholeEngine, hand_over

pytestmark = pytest.mark.usefixtures("forked_workers")

NUM_REQUESTS = 24
ALL_LAYERS, FIRST_LAYERS = 6, 2
Speculation = Mapping[str, Any]


def make_requests() -> list[EngineRequest]:
    return REPEATING.requests(NUM_REQUESTS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_draft_pair(tmp_path_factory.mktemp("pair"), ALL_LAYERS, FIRST_LAYERS)


@pytest.fixture(params=["layers", "model"])
def speculation(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Speculation:
    """The draft model: the served model's first layers, or another model with the same layers."""
    return with_layers() if request.param == "layers" else with_model(pair)


def with_layers(num_layers: int = FIRST_LAYERS) -> Speculation:
    return {**PLAIN, "method": "draft_model", "draft_layers": num_layers}


def with_model(pair: tuple[Path, Path]) -> Speculation:
    return {**PLAIN, "method": "draft_model", "draft_model": str(pair[1])}


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessing and verifying cost next to nothing, so that there are drafts in every step."""
    monkeypatch.setattr("engine.draft_parts.EQUAL_ROWS", {"cpu": 1e6})
    monkeypatch.setattr("engine.draft_parts.cost_of", lambda *_: 0.01)


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> Answers:
    """Without drafts, all at once."""
    with EnginesOf(pair[0]) as engines:
        return ask(engines, engines.start("plain", speculation=PLAIN, **ROOMY), make_requests())


@pytest.fixture
def engines(pair: tuple[Path, Path]) -> Iterator[EnginesOf]:
    with EnginesOf(pair[0]) as engines:
        yield engines


@pytest.mark.parametrize(
    "settings",
    [ROOMY, {**TIGHT, "preemption": "recompute"}, {**TIGHT, "preemption": "swap"}],
    ids=["roomy", "recompute", "swap"],
)
def test_c62_a_draft_model_changes_no_token_of_many_requests_at_once(
    engines: EnginesOf, expected: Answers, speculation: Speculation, settings: dict[str, Any]
) -> None:
    engine = engines.start("drafting", speculation=speculation, **settings)
    answers = ask(engines, engine, make_requests())
    assert_same(answers, expected)
    assert_some_were_right_and_some_wrong(engine, answers)
    assert_preempted_as(settings, engine)


def test_c62_a_draft_model_changes_no_token_of_requests_that_are_handed_over(
    engines: EnginesOf, expected: Answers, speculation: Speculation
) -> None:
    """The draft model is also right as often as without a hand-over."""
    producer = engines.start("producer", speculation=speculation, **ROOMY)
    consumer = engines.start("consumer", speculation=speculation, **ROOMY)
    alone = engines.start("alone", speculation=speculation, **ROOMY)
    for request in make_requests():
        hand_over(producer, consumer, request)
        alone.add(request)
    engines.run()
    assert_same(consumer.take_answers(), expected)
    assert num_drafts(producer) == (0, 0), "a prefill worker's only token waits for no draft"
    assert share_right(consumer) == pytest.approx(share_right(alone), abs=0.05)


def test_c62_rank_0_alone_computes_a_draft_model(
    engines: EnginesOf, expected: Answers, pair: tuple[Path, Path]
) -> None:
    engine = engines.start("drafting", 2, speculation=with_model(pair), **ROOMY)
    answers = ask(engines, engine, make_requests())
    assert_same(answers, expected, is_whole=False)
    assert_some_were_right_and_some_wrong(engine, answers)


def test_c62_a_request_goes_on_with_right_drafts_elsewhere_and_after_a_hit(
    engines: EnginesOf, expected: Answers, pair: tuple[Path, Path]
) -> None:
    """It continues after the tokens that its client has, and later finds its blocks in the prefix cache."""
    itself = {**PLAIN, "method": "draft_model", "draft_model": str(pair[0])}
    for name, drafting in (("layers", with_layers(ALL_LAYERS)), ("model", itself)):
        engine = engines.start(name, speculation=drafting, **ROOMY)
        for _ in range(2):
            answers = ask(engines, engine, begun(make_requests(), expected))
            assert_rest(answers, expected)
        assert engine.core.counters()["prefix_cache_hits"] > 0
        assert share_right(engine) == 1.0


def test_other_layers_in_their_own_pool_guess_as_the_models_first_layers_do(
    engines: EnginesOf, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CATCH_UP", "MOST_CAUGHT_UP"):
        monkeypatch.setattr(f"engine.draft_model.{limit}", 100_000)
    # The number of drafts of a request depends on the requests in its steps. The time to compile a grammar varies, and
    # with it the requests in a step. So requests with a grammar are left out.
    requests = [each for each in make_requests() if each.sampling_params.structured_output is None]
    counts = []
    for name, drafting in (("layers", with_layers()), ("model", with_model(pair))):
        engine = engines.start(name, speculation=drafting, **ROOMY)
        ask(engines, engine, requests)
        counts.append({key: count for key, count in engine.core.counters().items() if "spec_decode" in key})
    assert counts[0] == counts[1]
    assert len(counts[0]) > 3, "by position, too"


def share_right(engine: WholeEngine) -> float:
    num_verified, num_accepted = num_drafts(engine)
    return num_accepted / num_verified
