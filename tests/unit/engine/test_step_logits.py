"""The log-probabilities of a prompt are those of transformers, however its tokens are cut into steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.request import TokenLogprobs
from baton.sampling import SamplingParams
from engine import step_logits
from engine.loading.loader import LoadedModel
from tests.factories.stepping import GREEDY, StepDriver, load_on_cpu

WANTS = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=3)
PROMPT = [(7 * i + 3) % 300 for i in range(30)]


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_on_cpu(folder)


@pytest.fixture(scope="module")
def of_transformers(folder: Path) -> torch.Tensor:
    """The log-probability of each token of PROMPT, as transformers computes it."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV: torch.Tensor = theirs(torch.tensor([PROMPT])).logits[0]
    return logits_TV.log_softmax(-1)


@pytest.fixture(params=[1, 4, step_logits.ROWS_AT_ONCE])
def _rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_logits, "ROWS_AT_ONCE", request.param)


def prompt_logprobs_of(driver: StepDriver, name: str, chunk: int) -> Iterator[tuple[int, TokenLogprobs]]:
    """Computes the whole prompt; the position and the log-probability of each of its tokens but the first."""
    request = driver.requests[name]
    while request.num_computed < len(request.prompt):
        num_left = len(request.prompt) - request.num_computed
        output = driver.step({name: min(chunk, num_left)})
        if (latest := output.prompt_logprobs.get(name)) is not None:
            yield from enumerate(latest.logprobs, latest.first_position)


@pytest.mark.usefixtures("_rows_at_once")
@pytest.mark.parametrize("chunk", [1, 2, 7, 29, 30])
def test_they_are_those_of_transformers(
    model: LoadedModel, of_transformers: torch.Tensor, chunk: int
) -> None:
    driver = StepDriver(model)
    driver.add("a", PROMPT, WANTS)
    positions, logprobs = zip(*prompt_logprobs_of(driver, "a", chunk), strict=True)
    assert positions == tuple(range(1, 30))
    assert [each.token_id for each in logprobs] == PROMPT[1:]
    for before_V, each in zip(of_transformers, logprobs, strict=False):
        assert each.logprob == pytest.approx(float(before_V[each.token_id]), abs=1e-4)
        assert each.rank == int((before_V > before_V[each.token_id]).sum()) + 1
        assert [token_id for token_id, _ in each.top] == before_V.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(before_V.topk(3).values.tolist(), abs=1e-4)


def test_they_change_no_token_and_no_other_request(model: LoadedModel) -> None:
    prompts = {"a": PROMPT, "b": PROMPT[:9]}
    alone = StepDriver(model).generate(prompts, 8, chunk=5, params=GREEDY)
    driver = StepDriver(model)
    driver.add("a", PROMPT, WANTS)
    driver.add("b", PROMPT[:9], GREEDY)
    assert set(driver.step({"a": 5, "b": 5}).prompt_logprobs) == {"a"}
    output = driver.step({"a": 25, "b": 4})
    assert output.prompt_logprobs["a"].first_position == 6
    for _ in range(7):
        assert not driver.step({"a": 1, "b": 1}).prompt_logprobs, "they are computed once"
    assert {name: request.outputs for name, request in driver.requests.items()} == alone


def test_those_of_a_preempted_prompt_are_computed_again(model: LoadedModel) -> None:
    whole, driver = StepDriver(model), StepDriver(model)
    whole.add("a", PROMPT, WANTS)
    driver.add("a", PROMPT, WANTS)
    driver.step({"a": 11})
    driver.preempt("a")
    driver.step({})
    assert list(prompt_logprobs_of(driver, "a", 30)) == list(prompt_logprobs_of(whole, "a", 30))


def test_a_prompt_of_one_token_has_none(model: LoadedModel) -> None:
    driver = StepDriver(model)
    driver.add("a", PROMPT[:1], WANTS)
    assert list(prompt_logprobs_of(driver, "a", 1)) == []


def test_a_prompt_whose_logits_are_not_finite_is_reported(model: LoadedModel) -> None:
    """It is reported even if no row samples, and if the last row is finite."""
    driver = StepDriver(model)
    driver.add("a", PROMPT, WANTS)
    driver.step({"a": 4})
    driver.pool.blocks_NLKHTD[driver.requests["a"].block_ids[0]] = torch.nan
    assert driver.step({"a": 4}).non_finite == {"a"}
