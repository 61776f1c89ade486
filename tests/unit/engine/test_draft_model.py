"""A draft model: if it computes the same as the served model, every draft is right."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from baton.sampling import SamplingParams
from engine.draft_model import CATCH_UP, DraftModel
from engine.drafts import Drafter
from engine.forward import TorchForward
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel
from engine.native.library import native_library
from engine.runner_parts import make_attention
from engine.sampler import TorchSampler
from tests.factories.models import make_draft_pair
from tests.factories.stepping import StepDriver, load_on_cpu

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_DRAFTS, NUM_TOKENS = 256, 6, 30
BLOCK_SIZES = (1, 4, 16)
PROMPTS = {f"r{length}": [(7 * i + length) % 300 for i in range(length)] for length in (2, 4, 9, 30)}
PARAMS = {
    "r2": SamplingParams(temperature=0.0, max_tokens=100),
    "r4": SamplingParams(temperature=1.0, seed=3, max_tokens=100, logprobs=2),
    "r9": SamplingParams(
        temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=100
    ),
    "r30": SamplingParams(temperature=1.3, seed=9, max_tokens=100, top_k=50, min_p=0.01, logit_bias={4: 3.0}),
}
MakeDrafter = Callable[[KVPool], Drafter]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_draft_pair(tmp_path_factory.mktemp("pair"), num_layers=4)


@pytest.fixture(scope="module", params=["native", "torch"])
def model(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    if request.param == "native" and native_library() is None:
        pytest.skip("needs a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("engine.loading.loader.native_library", lambda: None)
        yield load_on_cpu(pair[0])


def drafter_of(
    model: LoadedModel,
    num_layers: int,
    *,
    shares_kv: bool,
    num_drafts: int = NUM_DRAFTS,
    max_tokens: int = 1000,
) -> MakeDrafter:
    """A drafter whose model is the served model's first layers, with the served model's pool or a pool of its own. A
    guess costs almost nothing."""

    def make(pool: KVPool) -> Drafter:
        decoder = model.decoder.first_layers(num_layers)
        own_pool = pool if shares_kv else KVPool(pool.num_blocks, pool.shape, CPU)
        forward = TorchForward(decoder, make_attention(model, own_pool), CPU)
        proposer = DraftModel(
            forward,
            TorchSampler(),
            pool.shape.block_size,
            range(NUM_BLOCKS, pool.num_blocks),
            num_drafts,
            0.001,
            shares_kv=shares_kv,
        )
        return Drafter(proposer, num_drafts, max_tokens, num_equal_rows=1e6)

    return make


class DraftingDriver(StepDriver):
    """Verifies in every step the drafts that were guessed after the step before."""

    def __init__(self, model: LoadedModel, drafter: MakeDrafter, block_size: int = 4) -> None:
        num_spare = len(PROMPTS) * -(-NUM_DRAFTS // block_size)
        super().__init__(
            model, num_blocks=NUM_BLOCKS, block_size=block_size, num_spare_blocks=num_spare, drafter=drafter
        )
        self.drafts: dict[str, tuple[int, ...]] = {}
        self.num_verified = self.num_accepted = 0

    def draft(self, *names: str) -> Mapping[str, list[int]]:
        """A step of these requests; returns what it sampled."""
        drafts = {name: self.drafts.pop(name) for name in names if name in self.drafts}
        lacking = {name: self.requests[name].num_tokens - self.requests[name].num_computed for name in names}
        output = self.step(lacking, drafts)
        for name, each in drafts.items():
            self.num_verified += len(each)
            self.num_accepted += len(output.sampled_token_ids[name]) - 1
        self.drafts |= output.draft_token_ids
        return output.sampled_token_ids


def begin(driver: StepDriver) -> None:
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, PARAMS[name])


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[str, list[int]]:
    """Each request by itself, token by token."""
    answers = {}
    for name, prompt in PROMPTS.items():
        driver = StepDriver(model)
        driver.add(name, prompt, PARAMS[name])
        driver.step({name: len(prompt)})
        for _ in range(NUM_TOKENS + NUM_DRAFTS):
            driver.step({name: 1})
        answers[name] = driver.requests[name].outputs
    return answers


def assert_prefixes(driver: StepDriver, alone: dict[str, list[int]]) -> None:
    for name, request in driver.requests.items():
        assert request.outputs == alone[name][: len(request.outputs)], name


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shares_kv", [True, False], ids=["shared pool", "own pool"])
def test_every_draft_of_all_layers_is_right_however_it_is_sampled(
    model: LoadedModel, alone: dict[str, list[int]], block_size: int, shares_kv: bool
) -> None:
    num_layers = model.architecture.num_layers
    driver = DraftingDriver(model, drafter_of(model, num_layers, shares_kv=shares_kv), block_size)
    begin(driver)
    driver.draft(*PROMPTS)
    driver.draft(*PROMPTS)
    num_steps = 0
    while min(len(request.outputs) for request in driver.requests.values()) < NUM_TOKENS:
        sampled = driver.draft(*PROMPTS)
        num_steps += 1
        assert all(len(token_ids) > 1 for token_ids in sampled.values()), (
            "each step is drafted for each request"
        )
    assert_prefixes(driver, alone)
    assert driver.num_accepted == driver.num_verified
    assert num_steps <= NUM_TOKENS / 4


@pytest.mark.parametrize("shares_kv", [True, False], ids=["shared pool", "own pool"])
def test_drafts_of_some_layers_are_right_and_wrong_and_change_no_token(
    model: LoadedModel, alone: dict[str, list[int]], shares_kv: bool
) -> None:
    driver = DraftingDriver(model, drafter_of(model, 2, shares_kv=shares_kv))
    begin(driver)
    while lacking := [name for name, request in driver.requests.items() if len(request.outputs) < NUM_TOKENS]:
        driver.draft(*lacking)
    assert_prefixes(driver, alone)
    assert 0 < driver.num_accepted < driver.num_verified


def test_a_pool_of_its_own_changes_no_draft(model: LoadedModel) -> None:
    """The served model's first layers compute the same KV."""
    counts = []
    for shares_kv in (True, False):
        driver = DraftingDriver(model, drafter_of(model, 2, shares_kv=shares_kv))
        begin(driver)
        drafts = []
        for _ in range(10):
            driver.draft(*PROMPTS)
            drafts.append(dict(driver.drafts))
        counts.append(drafts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("shares_kv", [True, False], ids=["shared pool", "own pool"])
def test_a_preempted_request_goes_on_with_right_drafts(
    model: LoadedModel, alone: dict[str, list[int]], shares_kv: bool
) -> None:
    driver = DraftingDriver(model, drafter_of(model, model.architecture.num_layers, shares_kv=shares_kv))
    begin(driver)
    for _ in range(3):
        driver.draft(*PROMPTS)
    for name in ("r9", "r30"):
        driver.preempt(name)
        driver.drafts.pop(name)
    driver.draft("r2", "r30", "r4")  # in other blocks than before
    driver.draft(*PROMPTS)
    num_accepted = driver.num_accepted
    driver.draft(*PROMPTS)
    assert_prefixes(driver, alone)
    assert driver.num_accepted == driver.num_verified >= num_accepted + 2 * len(PROMPTS)


def test_a_first_token_never_waits_for_drafts(model: LoadedModel) -> None:
    """A first token does not wait for drafts of other requests, either."""
    driver = DraftingDriver(model, drafter_of(model, 2, shares_kv=True))
    begin(driver)
    driver.draft("r2", "r4")
    assert driver.drafts == {}
    driver.draft("r2", "r4")
    assert driver.drafts.keys() == {"r2", "r4"}
    driver.draft("r2", "r4", "r9")
    assert driver.drafts == {}
    driver.draft("r2", "r4", "r9")
    assert driver.drafts.keys() == {"r2", "r4", "r9"}


@pytest.mark.parametrize("block_size", [4, 128])
def test_a_pool_of_its_own_catches_up_in_parts(model: LoadedModel, block_size: int) -> None:
    """For example, after a hand-over a long prompt's tokens are computed beside several steps. Then every
    draft is right."""
    driver = DraftingDriver(
        model, drafter_of(model, model.architecture.num_layers, shares_kv=False), block_size
    )
    prompt = [(5 * i) % 300 for i in range(300)]
    driver.add("long", prompt)
    driver.draft("long")
    part = max(CATCH_UP, block_size)
    for num_computed in range(part, len(prompt), part):
        driver.draft("long")
        assert driver.drafts == {}
        assert driver.runner._requests["long"].num_drafting_tokens == num_computed
    for _ in range(3):
        driver.draft("long")
        assert driver.drafts
    assert driver.num_accepted == driver.num_verified > 0


@pytest.mark.parametrize(("max_tokens", "pays"), [(36, False), (50, True)])
def test_nothing_catches_up_with_a_long_prompt_for_a_short_answer(
    model: LoadedModel, max_tokens: int, pays: bool
) -> None:
    driver = DraftingDriver(model, drafter_of(model, 2, shares_kv=False))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    driver.add("long", [(5 * i) % 300 for i in range(300)], params)
    for _ in range(4):
        driver.draft("long")
    assert (driver.runner._requests["long"].num_drafting_tokens > 0) == pays


def test_a_request_that_lacks_much_does_not_delay_the_drafts_of_others(model: LoadedModel) -> None:
    num_layers = model.architecture.num_layers
    driver = DraftingDriver(model, drafter_of(model, num_layers, shares_kv=False))
    for name in ("one", "two"):
        driver.add(name, [(5 * i) % 300 for i in range(100)])
    driver.add("short", [1, 2, 3])
    names = ("one", "two", "short")
    driver.draft(*names)
    with_drafts = []
    for _ in range(5):
        driver.draft(*names)
        with_drafts.append(set(driver.drafts))
    assert with_drafts[0] == {"short"}
    assert with_drafts[1] == {"short", "one"}
    assert with_drafts[-1] == set(names)


def test_requests_that_catch_up_share_the_tokens_of_a_step(model: LoadedModel) -> None:
    """For example, several chats may be handed over at once. Requests that lack the fewest tokens come first."""
    driver = DraftingDriver(model, drafter_of(model, model.architecture.num_layers, shares_kv=False))
    lengths = {"long": 60, "c0": 40, "c1": 40, "c2": 30}
    for name, length in lengths.items():
        driver.add(name, [(5 * i + length) % 300 for i in range(length)])
    driver.draft(*lengths)
    with_drafts, num_caught_up, before = [], [], 0
    for _ in range(3):
        driver.draft(*lengths)
        with_drafts.append(set(driver.drafts))
        now = sum(driver.runner._requests[name].num_drafting_tokens for name in lengths)
        num_caught_up.append(now - before)
        before = now
    most_new = sum(1 + NUM_DRAFTS for _ in lengths)
    assert max(num_caught_up) <= CATCH_UP + most_new
    assert with_drafts == [{"c2"}, {"c2", "c0", "c1"}, set(lengths)]
    assert driver.num_accepted == driver.num_verified > 0


def test_requests_that_lack_the_tokens_of_a_few_steps_all_get_drafts(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests lack them after steps with a request's first token, which bring no drafts."""
    monkeypatch.setattr("engine.draft_model.CATCH_UP", 16)
    make = drafter_of(model, model.architecture.num_layers, shares_kv=False)
    driver = DraftingDriver(model, make, block_size=16)
    for name in PROMPTS:
        driver.add(name, [len(name) + i for i in range(14)])
    driver.draft(*PROMPTS)
    driver.draft(*PROMPTS)
    assert set(driver.drafts) == set(PROMPTS)


def test_no_draft_reaches_beyond_the_last_token(model: LoadedModel) -> None:
    driver = DraftingDriver(model, drafter_of(model, model.architecture.num_layers, shares_kv=True))
    driver.add("r", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    counts = []
    for _ in range(3):
        driver.draft("r")
        counts.append(len(driver.drafts.get("r", ())))
    assert counts == [0, 1, 0]
    assert len(driver.requests["r"].outputs) == 4


def test_drafts_end_before_a_stop_token(model: LoadedModel, alone: dict[str, list[int]]) -> None:
    answer = alone["r30"]
    place = next(i for i in range(4, len(answer)) if answer[i] not in answer[:i])
    driver = DraftingDriver(model, drafter_of(model, model.architecture.num_layers, shares_kv=True))
    driver.add("r30", PROMPTS["r30"], PARAMS["r30"], [answer[place]])
    while len(driver.requests["r30"].outputs) <= place:
        known = len(driver.requests["r30"].outputs)
        assert list(driver.drafts.get("r30", ())) == answer[known:][: len(driver.drafts.get("r30", ()))]
        assert known + len(driver.drafts.get("r30", ())) <= place
        driver.draft("r30")
    assert driver.drafts == {}, "the request has ended"
