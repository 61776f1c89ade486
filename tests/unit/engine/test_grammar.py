"""Grammars: what compiles, what is refused and how, and what a matcher allows on its way."""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.errors import InvalidRequest
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from engine.grammars import compiler as module
from engine.grammars.compiler import GrammarCompiler, Matcher
from engine.grammars.library import Compiled, GrammarLibrary
from engine.kv_cache import KVPool
from engine.pipeline import make_pipeline
from engine.runner_parts import make_runner
from scheduler import RequestStatus, Scheduler
from tests.factories.engine import FakeBlockMover
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer
from tests.factories.scheduling import make_config
from tests.factories.stepping import load_on_cpu
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

YES_OR_NO = StructuredOutput(GrammarKind.REGEX, "(yes|no)")
POINT = StructuredOutput(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": false}',
)


class Compiler:
    """A GrammarCompiler that is waited for."""

    def __init__(self, folder: Path, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> None:
        self._has_output = threading.Event()
        self.vocab_size = make_tokenizer().get_vocab_size()
        self.compiler = GrammarCompiler(
            folder, self.vocab_size, eos_token_ids, self._has_output.set, SystemClock()
        )

    def error_of(self, output: StructuredOutput) -> str | None:
        self._has_output.clear()
        self.compiler.compile(output)
        assert self._has_output.wait(20)
        (news,) = self.compiler.take_compiled()
        assert news.output == output
        return news.error


@pytest.fixture
def compiler(folder: Path) -> Iterator[Compiler]:
    compiler = Compiler(folder)
    yield compiler
    compiler.compiler.close()


def test_once_started_it_needs_no_further_thread(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compiler.start()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
    assert compiler.error_of(YES_OR_NO) is None


def test_a_matcher_allows_what_can_still_match_and_at_the_end_only_the_end(compiler: Compiler) -> None:
    assert compiler.error_of(YES_OR_NO) is None
    matcher = compiler.compiler.matcher(YES_OR_NO)
    assert matcher is not None
    tokenizer = make_tokenizer()
    first = {tokenizer.decode([int(i)]) for i in matcher.allowed().nonzero()[0]}
    assert first
    assert all("yes".startswith(text) or "no".startswith(text) for text in first)
    token_ids = tokenizer.encode("no").ids
    assert [matcher.consume(token_id) for token_id in token_ids] == [None] * len(token_ids)
    assert matcher.allowed().nonzero()[0].tolist() == [EOS_TOKEN_ID]
    assert matcher.allowed().shape == (compiler.vocab_size,)
    bits = np.unpackbits(matcher.allowed_words().view(np.uint8), bitorder="little")
    assert len(bits) == -(-compiler.vocab_size // 32) * 32
    assert bits[: compiler.vocab_size].astype(np.bool_).tolist() == matcher.allowed().tolist()
    matcher.rewind(0)
    assert {tokenizer.decode([int(i)]) for i in matcher.allowed().nonzero()[0]} == first
    assert str(matcher.consume(EOS_TOKEN_ID)).startswith("structured_output: the answer cannot continue")
    another = compiler.compiler.matcher(YES_OR_NO)
    assert another is not None
    assert {tokenizer.decode([int(i)]) for i in another.allowed().nonzero()[0]} == first, "each at its start"


def test_what_may_follow_drafts_is_known_without_taking_them(compiler: Compiler) -> None:
    abc = StructuredOutput(GrammarKind.REGEX, "abc|abd")
    assert compiler.error_of(abc) is None
    matcher, ahead = compiler.compiler.matcher(abc), compiler.compiler.matcher(abc)
    assert matcher is not None
    assert ahead is not None
    a, b, c, d = (make_tokenizer().encode(letter).ids[0] for letter in "abcd")
    at_first = matcher.allowed().tolist()
    assert matcher.num_valid([a, b, d, EOS_TOKEN_ID]) == 4
    assert matcher.num_valid([a, d, b]) == 1
    assert matcher.num_valid([d]) == 0
    for drafts in ([a], [a, b], [a, b, c], [a, b, c, EOS_TOKEN_ID]):
        words = matcher.allowed_words(drafts)
        assert ahead.consume(drafts[-1]) is None
        if drafts[-1] != EOS_TOKEN_ID:
            assert matcher.allowed(drafts).tolist() == ahead.allowed().tolist()
            assert words.tolist() == ahead.allowed_words().tolist()
        assert matcher.allowed().tolist() == at_first
    matcher.allowed([a, d, b])  # has no meaning
    assert matcher.allowed().tolist() == at_first
    assert matcher.allowed().any()
    assert [matcher.consume(each) for each in (a, b, d, EOS_TOKEN_ID)] == [None] * 4


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (StructuredOutput(GrammarKind.REGEX, "(yes"), "invalid regex: unclosed group"),
        (StructuredOutput(GrammarKind.LARK, 'start: "x" foo'), 'unknown name: "foo"'),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "objekt"}'), "Invalid type: objekt"),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, "[1"), "the schema is not valid JSON"),
        (StructuredOutput(GrammarKind.JSON_SCHEMA, "[1]"), "a schema must be a JSON object, got list"),
    ],
)
def test_c13_what_does_not_compile_says_why_and_the_next_one_is_served(
    compiler: Compiler, output: StructuredOutput, complaint: str
) -> None:
    error = compiler.error_of(output)
    assert error is not None
    assert re.match(f"structured_output: .*{complaint}", error)
    assert compiler.error_of(YES_OR_NO) is None


def test_without_an_end_or_a_tokenizer_there_is_no_structured_output(folder: Path, tmp_path: Path) -> None:
    endless, mute = Compiler(folder, eos_token_ids=()), Compiler(tmp_path)
    assert "no end-of-sequence token" in (endless.error_of(YES_OR_NO) or "")
    assert "cannot read this model's tokenizer" in (mute.error_of(YES_OR_NO) or "")
    for compiler in (endless, mute):
        compiler.compiler.close()


def test_unused_grammars_are_kept_up_to_so_many_bytes_and_those_in_use_besides(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it = GrammarLibrary.compile
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 300)
    monkeypatch.setattr(GrammarLibrary, "compile", lambda *args: Compiled(compile_it(*args).matcher, 100))
    outputs = [StructuredOutput(GrammarKind.REGEX, f"no{number}") for number in range(6)]
    for number, output in enumerate(outputs):
        assert compiler.compiler.is_full == (number > 3)
        assert compiler.error_of(output) is None
    compiler.compiler.evict(in_use={outputs[0], outputs[-1]})
    assert compiler.compiler.matcher(outputs[0]) is not None
    assert compiler.compiler.matcher(outputs[1]) is None, "the device's thread never compiles"
    assert compiler.compiler.matcher(outputs[2]) is not None
    assert not compiler.compiler.is_full, "requests are not looked at again before another one is compiled"
    assert compiler.error_of(outputs[1]) is None
    assert compiler.compiler.matcher(outputs[1]) is not None
    compiler.compiler.evict(in_use := MagicMock())
    assert in_use.__contains__.call_count == 3, (
        "between two steps, the engine does not look at those that stay"
    )


class PanicError(BaseException):
    """As PyO3 raises a panic of Rust code: it is no Exception."""


class Panicking:
    """A matcher of a library with a defect."""

    def deep_copy(self) -> "Panicking":
        return self

    def _panic(self, _: object = None) -> None:
        raise PanicError("index out of bounds")

    consume_token = compute_bitmask = validate_tokens = _panic


def test_c13_a_panic_of_the_library_fails_the_request_that_it_concerns() -> None:
    compiled = Compiled(Panicking(), 0)
    matcher = Matcher(compiled, None, 12)
    assert matcher.allowed().all()
    assert "cannot continue: index out of bounds" in (matcher.consume(1) or "")
    assert "cannot continue: index out of bounds" in (Matcher(compiled, None, 12).consume(1) or "")
    guessing = Matcher(compiled, None, 12)
    assert guessing.num_valid([1, 2]) == 0
    assert "cannot continue: index out of bounds" in (guessing.consume(1) or "")


def test_c13_a_panic_of_the_library_ends_one_grammar_and_not_the_thread(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise PanicError("unreachable code")

    with monkeypatch.context() as patched:
        patched.setattr(GrammarLibrary, "compile", panic)
        assert compiler.error_of(YES_OR_NO) == "structured_output: unreachable code"
    assert compiler.error_of(YES_OR_NO) is None


def chain(num_rules: int) -> StructuredOutput:
    rules = "".join(f"a{number}: a{number + 1}\n" for number in range(num_rules))
    return StructuredOutput(GrammarKind.LARK, f'start: a0\n{rules}a{num_rules}: "no"')


def test_a_chain_of_rules_that_ends_a_usual_stack_compiles_and_matches(compiler: Compiler) -> None:
    assert compiler.error_of(chain(6_000)) is None
    matcher = compiler.compiler.matcher(chain(6_000))
    assert matcher is not None
    for token_id in make_tokenizer().encode("no").ids:
        assert matcher.allowed()[token_id]
        assert matcher.consume(token_id) is None


class SlowCompiler(GrammarCompiler):
    """Starts to compile when it may, and notes what it did."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 8, (0,), lambda: None, SystemClock())
        self.may_compile = threading.Event()
        self.compiled: list[str] = []

    def _compile(self, output: StructuredOutput) -> None:
        self.may_compile.wait()
        self.compiled.append(output.source)
        until = time.thread_time() + 0.002
        while time.thread_time() < until:  # a cost to be charged
            pass


def regex(source: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, source)


def test_c57_slow_grammars_of_one_caller_delay_another_one_by_a_single_compilation(folder: Path) -> None:
    compiler = SlowCompiler(folder)
    for number in range(20):
        compiler.compile(regex(f"slow {number}"), caller=1)
    for source in "ab":
        compiler.compile(regex(source), caller=2)
    compiler.may_compile.set()
    while "b" not in compiler.compiled:
        time.sleep(0.001)
    assert compiler.compiled[: compiler.compiled.index("b") + 1].count("slow 0") == 1
    assert compiler.compiled.index("b") <= 3, compiler.compiled
    compiler.close()


def test_unneeded_grammars_are_not_compiled(folder: Path) -> None:
    compiler = SlowCompiler(folder)
    for source in "abcb":
        compiler.compile(regex(source))
    compiler.keep_only(frozenset({regex("c")}))
    compiler.compile(regex("d"))
    compiler.may_compile.set()
    while "d" not in compiler.compiled:
        time.sleep(0.001)
    assert compiler.compiled[-2:] == ["c", "d"], "a may have been under way"
    compiler.close()


def test_closing_waits_for_no_queue(folder: Path) -> None:
    compiler = SlowCompiler(folder)
    for source in "abc":
        compiler.compile(regex(source))
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not compiler._is_closing:
        time.sleep(0.001)
    compiler.may_compile.set()
    closing.join(20)
    assert not closing.is_alive()
    assert compiler.compiled in ([], ["a"])


@pytest.mark.parametrize("settings", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_settings_that_would_continue_past_the_end_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="with a structured output"):
        SamplingParams(structured_output=YES_OR_NO, **settings)  # type: ignore[arg-type]


class Engine:
    """A whole engine over a tiny random model. Without a grammar, its answers match no grammar."""

    def __init__(self, folder: Path, **settings: object) -> None:
        model = load_on_cpu(folder)
        config = make_config(**{"max_model_len": 256, **settings})
        assert config.num_blocks is not None
        pool = KVPool(config.num_blocks, model.kv_block_shape(16), model.device)
        self._has_output = threading.Event()
        self.grammars = GrammarCompiler(
            folder, model.vocab_size, model.eos_token_ids, self._has_output.set, SystemClock()
        )
        self.core = EngineCore(
            Scheduler(config, KVConnectorScheduler(16)),
            make_pipeline(
                make_runner(model, pool, grammars=self.grammars), async_scheduling=config.async_scheduling
            ),
            FakeBlockMover(),
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
        while self.core.scheduler.request_counts().waiting + self.core.scheduler.request_counts().running:
            for output in self.core.step().get("gateway", []):
                outputs.setdefault(output.request_id, []).append(output)
            if not self.core.may_progress:
                assert self._has_output.wait(20)
                self._has_output.clear()
        self.core.close()
        return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return make_tokenizer().decode([t for output in outputs for t in output.token_ids])


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_whatever_the_model_would_say_the_output_matches(
    folder: Path, async_scheduling: bool, temperature: float
) -> None:
    engine = Engine(folder, async_scheduling=async_scheduling)
    engine.add("json", POINT, temperature=temperature, seed=3)
    engine.add("regex", YES_OR_NO, temperature=temperature, seed=4)
    engine.add("free", None, ignore_eos=True)
    outputs = engine.run()
    assert text_of(outputs["regex"]) in ("yes", "no")
    assert json.loads(text_of(outputs["json"])) in ({"x": 1}, {"x": 2})
    assert outputs["json"][-1].finish_reason is outputs["regex"][-1].finish_reason is FinishReason.STOP
    assert outputs["free"][-1].finish_reason is FinishReason.LENGTH


def test_c13_a_broken_grammar_fails_its_request_alone_as_the_clients_mistake(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("broken", StructuredOutput(GrammarKind.REGEX, "(yes"))
    engine.add("good", YES_OR_NO)
    outputs = engine.run()
    last = outputs["broken"][-1]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID_REQUEST)
    assert text_of(outputs["good"]) in ("yes", "no")


@pytest.mark.parametrize(("async_scheduling", "bias"), [(True, 0.0), (False, 0.0), (True, 100.0)])
@pytest.mark.parametrize("source", ['start: start "a"', 'start: "no" end\nend: end "x"'])
def test_an_answer_that_cannot_go_on_is_an_error_and_not_complete(
    folder: Path, source: str, async_scheduling: bool, bias: float
) -> None:
    engine = Engine(folder, async_scheduling=async_scheduling)
    engine.add("dead", StructuredOutput(GrammarKind.LARK, source), logit_bias={EOS_TOKEN_ID: bias})
    engine.add("good", YES_OR_NO)
    outputs = engine.run()
    last = outputs["dead"][-1]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID_REQUEST)
    assert "no token can follow" in (last.error or "")
    assert text_of(outputs["dead"]) in source, "no token that no mask has allowed"
    assert text_of(outputs["good"]) in ("yes", "no")


def test_a_preempted_request_continues_where_its_grammar_was(folder: Path) -> None:
    engine = Engine(folder, num_blocks=4, enable_prefix_caching=False, max_num_batched_tokens=64)
    lists = StructuredOutput(GrammarKind.REGEX, "(no, ){9}no")
    for name in ("a", "b"):
        engine.add(name, lists, max_tokens=45)
    outputs = engine.run()
    assert {text_of(outputs[name]) for name in ("a", "b")} == {"no, " * 9 + "no"}
    assert engine.core.counters()["preemptions"] > 0


@pytest.mark.parametrize("first", [regex("(no, )no"), regex("(yes"), None])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_id_that_is_used_again_has_its_own_grammar(
    folder: Path, first: StructuredOutput | None, num_steps: int
) -> None:
    engine = Engine(folder)
    engine.add("r", first)
    for _ in range(num_steps):
        engine.core.step()
    engine.core.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    engine.add("r", YES_OR_NO)
    outputs = engine.run()["r"]
    assert text_of([output for output in outputs if output.error is None]) in ("yes", "no")
    assert outputs[-1].finish_reason is FinishReason.STOP
