"""Intake: every prompt and every token is held against the model, and what is wrong is named."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.clock import SystemClock
from baton.errors import DeadlinePassed, InvalidRequest
from baton.sampling import SamplingParams
from gateway.grammars import CompileProcess, GrammarCheck, process_arguments
from gateway.model import ServedModel
from gateway.preprocess import Intake, Prompt
from gateway.requests.run import Generation
from gateway.text import ChatMessage, Tokenizer
from tests.factories.models import make_model_dir, make_tokenizer

VOCAB_SIZE = make_tokenizer().get_vocab_size()
MAX_MODEL_LEN = 100


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    folder: Path = make_model_dir(tmp_path_factory.mktemp("model"))
    model = ServedModel("tiny", str(folder), MAX_MODEL_LEN, VOCAB_SIZE, (2,))
    grammars = GrammarCheck(partial(CompileProcess, process_arguments(folder, model)), SystemClock())
    return Intake(Tokenizer(folder), model, grammars)


def take_in(intake: Intake, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
    def sampling(room: int) -> SamplingParams:
        return params or SamplingParams(max_tokens=room)

    return asyncio.run(intake.generation(prompt, sampling))


def test_an_answer_may_fill_what_the_prompt_leaves(intake: Intake) -> None:
    generation = take_in(intake, (5,) * 40)
    assert generation.prompt_token_ids == (5,) * 40
    assert generation.sampling_params.max_tokens == MAX_MODEL_LEN - 40


def test_requests_without_a_name_get_one_each(intake: Intake) -> None:
    assert take_in(intake, (5,)).request_id != take_in(intake, (5,)).request_id


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((), "it is empty"),
        ((1,) * MAX_MODEL_LEN, f"{MAX_MODEL_LEN} tokens leave no room"),
        ((1, VOCAB_SIZE), f"{VOCAB_SIZE} is not among the model's {VOCAB_SIZE}"),
    ],
)
def test_prompts_that_the_model_cannot_take(
    intake: Intake, token_ids: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        take_in(intake, token_ids)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=(VOCAB_SIZE,))),
        ("logit_bias", SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    ],
)
def test_tokens_that_the_model_lacks_are_named_by_field(
    intake: Intake, field: str, params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        take_in(intake, (5,), params)
    assert caught.value.field == field


def test_texts_that_fill_the_model_are_refused_and_much_longer_ones_without_tokenising(
    intake: Intake,
) -> None:
    with pytest.raises(InvalidRequest, match="leave no room"):
        take_in(intake, "x" * MAX_MODEL_LEN)
    with pytest.raises(InvalidRequest, match="characters are more than the model can take"):
        take_in(intake, "x" * 100 * MAX_MODEL_LEN)


def test_a_deadline_counts_from_before_the_prompt_is_tokenised(intake: Intake) -> None:
    def slow(turns: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        time.sleep(0.2)
        return "hi"

    async def run() -> None:
        with patch.object(intake.pool.tokenizer, "render_chat", slow):
            generation = await intake.generation(
                [ChatMessage("user", "hi")], lambda _: SamplingParams(), timeout_s=30.0
            )
            assert generation.timeout_s is not None
            assert 0.0 < generation.timeout_s <= 29.8
            with pytest.raises(DeadlinePassed, match="before its prompt was tokenised"):
                await intake.generation(
                    [ChatMessage("user", "hi")], lambda _: SamplingParams(), timeout_s=0.05
                )

    asyncio.run(run())


def test_a_conversation_is_rendered_with_the_models_own_template(intake: Intake) -> None:
    said = take_in(intake, [ChatMessage("user", "hi")]).prompt_token_ids
    assert take_in(intake, "hi").prompt_token_ids[-1] in said
    assert said != take_in(intake, [ChatMessage("system", "hi")]).prompt_token_ids
