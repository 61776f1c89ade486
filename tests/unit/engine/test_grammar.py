"""Grammars: what compiles, what is refused and how, and what a matcher allows on its way."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.clock import SystemClock
from baton.config import ModelConfig
from baton.errors import InvalidRequest
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from engine.core import EngineCore
from engine.grammar import MAX_GRAMMARS, GrammarCompiler, GrammarNews
from engine.kv_cache import KVPool
from engine.loader import load_model
from engine.pipeline import make_pipeline
from engine.runner import ModelRunner
from kv_transfer import KVConnectorScheduler
from scheduler import RequestStatus, Scheduler
from tests.factories.engine import FakeConnectorWorker
from tests.factories.models import EOS_TOKEN_ID, make_model_dir, make_tokenizer
from tests.factories.scheduling import make_config

YES_OR_NO = StructuredOutput(GrammarKind.REGEX, "(yes|no)")
POINT = StructuredOutput(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": false}',
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


class Compiler:
    """A GrammarCompiler that is waited for."""

    def __init__(self, model_dir: Path, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> None:
        self._has_news = threading.Event()
        self.vocab_size = make_tokenizer().get_vocab_size()
        self.compiler = GrammarCompiler(model_dir, self.vocab_size, eos_token_ids, self._has_news.set)

    def news_of(self, output: StructuredOutput, request_id: str = "r") -> GrammarNews:
        self._has_news.clear()
        self.compiler.compile(request_id, output)
        assert self._has_news.wait(20)
        return self.compiler.take_news()


@pytest.fixture
def compiler(model_dir: Path) -> Iterator[Compiler]:
    compiler = Compiler(model_dir)
    yield compiler
    compiler.compiler.close()


def test_a_matcher_allows_what_can_still_match_and_at_the_end_only_the_end(compiler: Compiler) -> None:
    assert compiler.news_of(YES_OR_NO) == GrammarNews(ready=("r",))
    matcher = compiler.compiler.take_matcher("r")
    assert matcher is not None
    assert compiler.compiler.take_matcher("r") is None
    tokenizer = make_tokenizer()
    first = {tokenizer.decode([int(i)]) for i in matcher.allowed().nonzero()[0]}
    assert first
    assert all("yes".startswith(text) or "no".startswith(text) for text in first)
    token_ids = tokenizer.encode("no").ids
    assert [matcher.consume(token_id) for token_id in token_ids] == [None] * len(token_ids)
    assert matcher.allowed().nonzero()[0].tolist() == [EOS_TOKEN_ID]
    assert matcher.allowed().shape == (compiler.vocab_size,)
    matcher.rewind(0)
    assert {tokenizer.decode([int(i)]) for i in matcher.allowed().nonzero()[0]} == first
    assert "cannot go on with token" in (matcher.consume(EOS_TOKEN_ID) or "")


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (StructuredOutput(GrammarKind.REGEX, "(yes"), "invalid regex .* unclosed group"),
        (StructuredOutput(GrammarKind.LARK, 'start: "x" foo'), 'unknown name: "foo"'),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "objekt"}'), "Invalid type: objekt"),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, "[1"), "the schema is not JSON"),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, "[1]"), "a schema is a JSON object, got list"),
    ],
)
def test_c13_what_does_not_compile_says_why_and_the_next_one_is_served(
    compiler: Compiler, output: StructuredOutput, complaint: str
) -> None:
    news = compiler.news_of(output)
    ((request_id, reason),) = news.failed
    assert (request_id, news.ready) == ("r", ())
    assert pytest.RaisesExc(ValueError, match=complaint).matches(ValueError(reason))
    assert reason.startswith("structured_output: ")
    assert compiler.news_of(YES_OR_NO, "next").ready == ("next",)


def test_without_an_end_or_a_tokenizer_there_is_no_structured_output(model_dir: Path, tmp_path: Path) -> None:
    endless, mute = Compiler(model_dir, eos_token_ids=()), Compiler(tmp_path)
    assert "no end-of-sequence token" in endless.news_of(YES_OR_NO).failed[0][1]
    assert "tokenizer cannot be read" in mute.news_of(YES_OR_NO).failed[0][1]
    for compiler in (endless, mute):
        compiler.compiler.close()


def test_only_so_many_compiled_grammars_are_kept(compiler: Compiler) -> None:
    for number in range(MAX_GRAMMARS + 3):
        output = StructuredOutput(GrammarKind.REGEX, f"no{number}")
        assert compiler.news_of(output, str(number)).ready == (str(number),)
        compiler.compiler.forget(str(number))
    assert len(compiler.compiler._compiled) == MAX_GRAMMARS


@pytest.mark.parametrize("settings", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_settings_that_would_go_on_past_the_end_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="with a structured output"):
        SamplingParams(structured_output=YES_OR_NO, **settings)  # type: ignore[arg-type]


class Engine:
    """A whole engine over a tiny random model, which left alone says nothing that matches anything."""

    def __init__(self, model_dir: Path, **settings: object) -> None:
        model = load_model(ModelConfig(dtype="float32"), model_dir, torch.device("cpu"))
        config = make_config(**{"max_model_len": 256, **settings})
        assert config.num_blocks is not None
        pool = KVPool(config.num_blocks, model.kv_block_shape(16), model.device)
        self._has_news = threading.Event()
        self.grammars = GrammarCompiler(
            model_dir, model.vocab_size, model.eos_token_ids, on_news=self._has_news.set
        )
        self.core = EngineCore(
            Scheduler(config, KVConnectorScheduler(16)),
            make_pipeline(
                ModelRunner(model, pool, grammars=self.grammars), async_scheduling=config.async_scheduling
            ),
            FakeConnectorWorker(),
            self.grammars,
            model.eos_token_ids,
            SystemClock(),
        )

    def add(self, request_id: str, output: StructuredOutput | None, **options: object) -> None:
        params = SamplingParams(structured_output=output, **{"temperature": 0.0, "max_tokens": 40, **options})  # type: ignore[arg-type]
        self.core.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=(5, 6, 7), sampling_params=params),
            "gateway",
        )

    def run(self) -> dict[str, list[RequestOutput]]:
        outputs: dict[str, list[RequestOutput]] = {}
        while self.core.request_counts().waiting + self.core.request_counts().running:
            for output in self.core.step().get("gateway", []):
                outputs.setdefault(output.request_id, []).append(output)
            if not self.core.may_progress:
                assert self._has_news.wait(20)
                self._has_news.clear()
        self.core.close()
        return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return make_tokenizer().decode([t for output in outputs for t in output.token_ids])


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_whatever_the_model_would_say_the_output_matches(
    model_dir: Path, async_scheduling: bool, temperature: float
) -> None:
    engine = Engine(model_dir, async_scheduling=async_scheduling)
    engine.add("json", POINT, temperature=temperature, seed=3)
    engine.add("regex", YES_OR_NO, temperature=temperature, seed=4)
    engine.add("free", None, ignore_eos=True)
    outputs = engine.run()
    assert text_of(outputs["regex"]) in ("yes", "no")
    assert json.loads(text_of(outputs["json"])) in ({"x": 1}, {"x": 2})
    assert outputs["json"][-1].finish_reason is outputs["regex"][-1].finish_reason is FinishReason.STOP
    assert outputs["free"][-1].finish_reason is FinishReason.LENGTH


def test_c13_a_broken_grammar_fails_its_request_alone_as_the_clients_mistake(model_dir: Path) -> None:
    engine = Engine(model_dir)
    engine.add("broken", StructuredOutput(GrammarKind.REGEX, "(yes"))
    engine.add("good", YES_OR_NO)
    outputs = engine.run()
    last = outputs["broken"][-1]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID_REQUEST)
    assert text_of(outputs["good"]) in ("yes", "no")


def test_a_preempted_request_goes_on_where_its_grammar_was(model_dir: Path) -> None:
    engine = Engine(model_dir, num_blocks=4, enable_prefix_caching=False, max_num_batched_tokens=64)
    lists = StructuredOutput(GrammarKind.REGEX, "(no, ){9}no")
    for name in ("a", "b"):
        engine.add(name, lists, max_tokens=45)
    outputs = engine.run()
    assert {text_of(outputs[name]) for name in ("a", "b")} == {"no, " * 9 + "no"}
    assert engine.core.counters()["preemptions"] > 0


def test_a_matcher_that_nobody_takes_is_forgotten(model_dir: Path) -> None:
    engine = Engine(model_dir)
    engine.add("gone", YES_OR_NO)
    engine.core.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED)
    assert engine._has_news.wait(20)
    while engine.core.may_progress:
        engine.core.step()
    engine.core.step()
    assert engine.grammars._matchers == {}
    engine.core.close()
