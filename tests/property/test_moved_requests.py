"""Behaviour 52: a request may be cut anywhere and continue on any worker: tokens and log-probabilities are the same."""

import random
from dataclasses import dataclass, replace

import pytest

from baton.request import EngineRequest, ErrorKind, FinishReason
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from tests.factories.whole_engines import Answer, EnginesOf, WholeEngine, hand_over

NUM_WORKLOADS = 6
MAX_TOKENS = 24
GRAMMARS = (
    StructuredOutput(GrammarKind.REGEX, "(no, ){3}(yes|no)"),
    StructuredOutput(GrammarKind.REGEX, r"(19|20)\d\d-\d\d-\d\d"),
    StructuredOutput(GrammarKind.JSON_SCHEMA, '{"enum": ["one", "two", {"three": [1, 2, 3]}]}'),
)


@dataclass(frozen=True, slots=True)
class Spec:
    """One request, and its outputs from an undisturbed engine."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    whole: Answer

    def cut(self, num_outputs: int, request_id: str, cache_salt: str | None) -> EngineRequest:
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=self.prompt,
            sampling_params=self.params,
            cache_salt=cache_salt,
            output_token_ids=tuple(self.whole.token_ids[:num_outputs]),
        )


def make_params(rng: random.Random) -> SamplingParams:
    options: dict[str, object] = {"max_tokens": MAX_TOKENS, "seed": rng.randrange(1_000)}
    options["temperature"] = rng.choice([0.0, 0.7, 1.5])
    if rng.random() < 0.5:
        options |= {"top_p": rng.choice([0.5, 0.95]), "top_k": rng.choice([0, 20])}
    if rng.random() < 0.5:
        options["logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.5:
        options |= {
            "repetition_penalty": rng.choice([1.0, 1.4]),
            "presence_penalty": rng.choice([0.0, 1.5]),
            "frequency_penalty": rng.choice([0.0, 0.8, -0.3]),
        }
    if rng.random() < 0.3:
        options["structured_output"] = rng.choice(GRAMMARS)
    else:
        options["ignore_eos"] = rng.random() < 0.5
        options["stop_token_ids"] = tuple(rng.sample(range(3, 300), rng.choice([0, 0, 25])))
        options["min_tokens"] = rng.choice([0, 0, 9])
    return SamplingParams(**options)  # type: ignore[arg-type]


def undisturbed(engines: EnginesOf, engine: WholeEngine, rng: random.Random, number: int) -> list[Spec]:
    """Some requests, answered by one engine."""
    specs = []
    for i in range(8):
        prompt = tuple(rng.randrange(3, 300) for _ in range(rng.choice([1, 7, 15, 16, 17, 40, 70])))
        request = EngineRequest(
            request_id=f"{number}-{i}", prompt_token_ids=prompt, sampling_params=make_params(rng)
        )
        engine.add(request)
        whole = engine.answers[request.request_id]
        specs.append(Spec(request.request_id, prompt, request.sampling_params, whole))
    engines.run()
    return specs


def assert_goes_on(spec: Spec, cut: int, answer: Answer) -> None:
    """Checks that `answer` has everything from position `cut` on."""
    what = f"{spec.name} cut at {cut}: {spec.params}"
    assert answer.first_position == cut, what
    assert answer.token_ids == spec.whole.token_ids[cut:], what
    assert answer.end is not None
    assert spec.whole.end is not None
    assert (answer.end.finish_reason, answer.end.stop_token_id) == (
        spec.whole.end.finish_reason,
        spec.whole.end.stop_token_id,
    ), what
    expected = spec.whole.logprobs[cut:]
    assert [(t.token_id, t.rank) for t in answer.logprobs] == [(t.token_id, t.rank) for t in expected], what
    for ours, theirs in zip(answer.logprobs, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4), what
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top], what
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-4), what


def test_c52_a_request_that_moves_goes_on_as_if_it_had_not(engines: EnginesOf) -> None:
    """It moves to one engine alone, or to a pair. The prefix cache there knows the whole prompt (without a
    salt), or nothing."""
    first = engines.start("first")
    alone, p, d = engines.start("alone", async_scheduling=False), engines.start("p"), engines.start("d")
    num_moves = 0
    for number in range(NUM_WORKLOADS):
        rng = random.Random(number)
        moves: list[tuple[Spec, int, list[tuple[WholeEngine, str]]]] = []
        for spec in undisturbed(engines, first, rng, number):
            for cut in sorted({0, rng.randrange(len(spec.whole.token_ids)), len(spec.whole.token_ids) - 1}):
                request_id, salt = f"{spec.name}@{cut}", rng.choice([None, f"{spec.name}@{cut}"])
                request = spec.cut(cut, request_id, salt)
                if rng.random() < 0.4:
                    target = rng.choice([alone, first])
                    target.add(request := replace(request, request_id=f"{request_id} again"))
                    moves.append((spec, cut, [(target, request.request_id)]))
                else:
                    hand_over(p, d, request)
                    moves.append((spec, cut, [(p, request_id), (d, request_id)]))
        engines.run()
        for spec, cut, owners in moves:
            assert_goes_on(spec, cut, joined([engine.answers[request_id] for engine, request_id in owners]))
        num_moves += len(moves)
    counters = d.core.counters()
    assert counters["kv_prompt_loads_done"] > num_moves / 4
    assert counters.get("kv_prompt_loads_failed", 0) == 0
    assert first.core.counters()["prefix_cache_hits"] > 0


def joined(answers: list[Answer]) -> Answer:
    """What the client receives: the first new token of a hand-over only once, then the tokens of the decode
    request."""
    if len(answers) == 1:
        return answers[0]
    producer, consumer = answers
    assert producer.end is not None
    if producer.end.finish_reason is not FinishReason.HANDED_OVER:
        return producer  # its one token ended the request
    assert len(producer.token_ids) == 1
    assert (consumer.first_position, consumer.token_ids[0]) == (
        producer.first_position,
        producer.token_ids[0],
    )
    assert consumer.logprobs[:1] == producer.logprobs
    return consumer


def test_c52_a_request_that_moves_again_and_again_says_every_token_once(engines: EnginesOf) -> None:
    """After every few tokens the request is given back, and continues elsewhere with its outputs so far."""
    pool = [engines.start(name, num_blocks=24) for name in ("a", "b", "c")]
    rng = random.Random(1)
    specs = undisturbed(engines, pool[0], rng, 0)
    said = {spec.name: list[int]() for spec in specs}
    left = {spec.name: spec for spec in specs}
    num_moves = 0
    while left:
        moves = {}
        for spec in left.values():
            request_id, (p, d) = f"{spec.name}#{num_moves}", rng.sample(pool, 2)
            request = spec.cut(len(said[spec.name]), request_id, cache_salt=rng.choice([None, spec.name]))
            if rng.random() < 0.5:
                d.add(request)
                moves[spec.name] = [d.answers[request_id]]
            else:
                hand_over(p, d, request)
                moves[spec.name] = [p.answers[request_id], d.answers[request_id]]
            num_moves += 1
        for _ in range(rng.randrange(2, 10)):
            engines.step()
        for engine in pool:
            engine.note(engine.core.give_back_requests("it drains"))
        engines.run()
        for name, answers in moves.items():
            said[name] += max(answers, key=lambda each: len(each.token_ids)).token_ids
            ends = [each.end for each in answers if each.end is not None]
            assert len(ends) == len(answers), "each request has ended"
            if any(end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for end in ends):
                del left[name]
    assert {spec.name: spec.whole.token_ids for spec in specs} == said
    assert num_moves > 2 * len(specs)


@pytest.mark.slow
def test_c52_workers_of_several_ranks_go_on_with_a_request_too(engines: EnginesOf) -> None:
    first, p, d = engines.start("first"), engines.start("p"), engines.start("d", num_ranks=2)
    rng = random.Random(3)
    cuts = {}
    for spec in undisturbed(engines, first, rng, 0):
        cut = rng.randrange(len(spec.whole.token_ids))
        cuts[spec.name] = spec, cut
        d.add(spec.cut(cut, f"{spec.name} alone", cache_salt="alone"))
        request = spec.cut(cut, spec.name, cache_salt="handed over")
        hand_over(p, d, request)
    engines.run()
    for name, (spec, cut) in cuts.items():
        assert_goes_on(spec, cut, d.answers[f"{name} alone"])
        assert_goes_on(spec, cut, joined([p.answers[name], d.answers[name]]))


def test_c13_outputs_that_contradict_their_grammar_end_only_their_own_request(engines: EnginesOf) -> None:
    p, d = engines.start("p", max_num_batched_tokens=16), engines.start("d", max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=30, temperature=0.0, structured_output=GRAMMARS[0])
    good = EngineRequest(request_id="good", prompt_token_ids=(5, 6, 7), sampling_params=params)
    d.add(good)
    engines.run()
    outputs = tuple(d.answers["good"].token_ids)
    assert outputs[0] != outputs[1]
    wrong = (outputs[1], *outputs[1:8])
    for number, (prompt_len, is_alone) in enumerate([(3, True), (40, True), (3, False), (40, False)]):
        request = EngineRequest(
            request_id=f"wrong{number}",
            prompt_token_ids=(9,) * prompt_len,
            sampling_params=params,
            output_token_ids=wrong,
        )
        if is_alone:
            d.add(request)
        else:
            hand_over(p, d, request)
    d.add(replace(good, request_id="right", output_token_ids=outputs[:4]))
    engines.run()
    assert d.answers["right"].token_ids == list(outputs[4:])
    for engine, names in ((d, ("wrong0", "wrong1")), (p, ("wrong2", "wrong3"))):
        for name in names:
            answer = engine.answers[name]
            assert answer.token_ids == [], "nothing follows what does not match"
            assert answer.end is not None
            assert answer.end.error_kind is ErrorKind.INVALID_REQUEST
            assert "cannot continue with token" in (answer.end.error or "")
    for name in ("wrong2", "wrong3"):
        assert (end := d.answers[name].end) is not None
        assert end.error_kind is ErrorKind.KV_LOAD_FAILED
