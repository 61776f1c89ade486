"""Answers with drafts and without: the same tokens, whatever happens to the requests.

    python -m tests.e2e.speculation [--engines cpu triton] [--methods ngram ...] [--ways alone ...] [--prompts 200]
                                    [--model windows]

Greedy requests and seeded ones at temperature 1, a third of them with a JSON schema or a regular expression. The model
is tiny and random; `windows` has three KV groups, two of them with a sliding window. `triton` is a GPU's engine whose
kernels are interpreted: a step takes a second, so its prompts and answers are few and short. Each row of the table is
one way; the command fails if an answer is wrong, or if the way did not cause what it should cause, such as
preemptions.
"""

import argparse
import asyncio
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.request import EngineRequest
from baton.sampling import GrammarKind, SamplingParams
from tests.factories.fragile_cluster import FragileCluster, fragile_cluster
from tests.factories.local_cluster import HANDING_OVER
from tests.factories.models import WINDOWED, make_model_dir
from tests.factories.speculation import (
    FORCING,
    PLAIN,
    REPEATING,
    ROOMY,
    TIGHT,
    Answers,
    ask,
    ask_one_by_one,
    tokens_of,
)
from tests.factories.whole_engines import EnginesOf, WholeEngine, hand_over

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "forced_tokens": False},
    "ngram of 8, forced tokens": {"method": "ngram", "num_speculative_tokens": 8, "forced_tokens": True},
    "forced tokens": {"forced_tokens": True},
    "the first layer": {"method": "draft_model", "draft_layers": 1, "forced_tokens": False},
}
"""Sections `speculation` of the configuration."""
NUM_PROMPTS = {"cpu": 200, "triton": 10}
"""By engine."""
NUM_TIGHT_ROWS = {"cpu": TIGHT["num_blocks"], "triton": 10}
"""Too few for the requests that run at once."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windows": ("qwen2", WINDOWED),
}
"""Architectures, and what their configurations say beside."""
NUM_GROUPS = {"plain": 1, "windows": 3}
SMALLER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""A model for an interpreter."""
SHORT_PROMPT, SHORT_ANSWER = 28, 8
"""Tokens, for an interpreter."""
NUM_AT_ONCE = 16
BEGIN = 1
"""The token with which a text begins."""
TOKENS_BEFORE_KILL = 5
"""On average of the requests."""
PATIENCE_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests, and the engines that answer them."""

    folder: Path
    requests: Sequence[EngineRequest]
    speculation: dict[str, Any]
    engine: str
    num_groups: int = 1
    """KV groups of the model."""

    @property
    def tight(self) -> dict[str, int]:
        return {"num_blocks": NUM_TIGHT_ROWS[self.engine] * self.num_groups}

    @property
    def is_interpreted(self) -> bool:
        return self.engine == "triton"

    def start(self, engines: EnginesOf, name: str, **scheduler: Any) -> WholeEngine:
        roomy = ROOMY | {"num_blocks": ROOMY["num_blocks"] * self.num_groups}
        engine = engines.start(name, speculation=self.speculation, **(roomy | scheduler))
        assert engine.model.layer_groups.groups.num_groups == self.num_groups
        return engine


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers' tokens by request, and counts of what happened."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


# ways


def alone(scene: Scene) -> Outcome:
    with EnginesOf(scene.folder, PATIENCE_S) as engines:
        engine = scene.start(engines, "alone")
        return _outcome(engine, ask_one_by_one(engines, engine, scene.requests))


def at_once(scene: Scene, **scheduler: Any) -> Outcome:
    """Runs as many requests at once as there are slots."""
    with EnginesOf(scene.folder, PATIENCE_S) as engines:
        engine = scene.start(engines, "many", **scheduler)
        return _outcome(engine, ask(engines, engine, scene.requests))


def handed_over(scene: Scene) -> Outcome:
    with EnginesOf(scene.folder, PATIENCE_S) as engines:
        producer, consumer = (scene.start(engines, name) for name in ("producer", "consumer"))
        for request in scene.requests:
            hand_over(producer, consumer, request)
        engines.run()
        return _outcome(consumer, consumer.take_answers())


def recomputed(scene: Scene) -> Outcome:
    return at_once(scene, **scene.tight, preemption="recompute")


def swapped(scene: Scene) -> Outcome:
    return at_once(scene, **scene.tight, preemption="swap")


def killed(scene: Scene) -> Outcome:
    """Processes behind a gateway. While each sixteen requests decode, one of two decode workers is killed."""
    return asyncio.run(_killed(scene))


WAYS: dict[str, tuple[Callable[[Scene], Outcome], str]] = {
    "alone": (alone, ""),
    "16 at once": (at_once, ""),
    "handed over": (handed_over, "kv_prompt_loads_done"),
    "recomputed": (recomputed, "preemptions"),
    "swapped": (swapped, "swapped_in_blocks"),
    "killed": (killed, "moved requests"),
}
"""With what must happen."""


def _outcome(engine: WholeEngine, answers: Answers) -> Outcome:
    counts = Counter(engine.core.counters())
    counts["drafts"] = counts["spec_decode_num_draft_tokens"]
    counts["right"] = counts["spec_decode_num_accepted_tokens"]
    return Outcome(tokens_of(answers), counts)


async def _killed(scene: Scene) -> Outcome:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"num_threads": 1, "progress_timeout_s": PATIENCE_S},
            "scheduler": {**ROOMY, "max_num_seqs": NUM_AT_ONCE, "max_model_len": 256},
            "speculation": scene.speculation,
            "gateway": HANDING_OVER,
            "network": {"heartbeat_interval_s": 0.1, "peer_timeout_s": 60.0},
            "cluster": {"prefill": 1, "decode": 2},
        }
    )
    options, outcome = ["--interpreted"] if scene.is_interpreted else [], Outcome()
    async with fragile_cluster(config, scene.folder, worker_options=options) as cluster:
        victim = None
        for begin in range(0, len(scene.requests), NUM_AT_ONCE):
            if victim is not None:
                await cluster.replace(victim)
            victim = "w2" if victim == "w1" else "w1"
            await _ask_and_kill(cluster, scene.requests[begin : begin + NUM_AT_ONCE], victim, outcome)
    return outcome


async def _ask_and_kill(
    cluster: FragileCluster, requests: Sequence[EngineRequest], victim: str, outcome: Outcome
) -> None:
    """Asks all requests at once, and adds their answers to the outcome."""
    counts, are_decoding = outcome.counts, asyncio.Event()
    enough = counts["tokens"] + TOKENS_BEFORE_KILL * len(requests)

    async def ask_gateway(request: EngineRequest) -> None:
        tokens = outcome.token_ids[request.request_id] = []
        async for event in cluster.client.generate(
            token_ids=request.prompt_token_ids, sampling=sampling_of(request.sampling_params)
        ):
            tokens += event.token_ids
            counts["tokens"] += len(event.token_ids)
            if counts["tokens"] >= enough:
                are_decoding.set()
            if event.completion is not None:
                counts["drafts"] += event.completion.usage["draft_tokens"]
                counts["right"] += event.completion.usage["accepted_draft_tokens"]
                counts["moved requests"] += event.completion.placement["attempts"] > 1

    async def kill() -> None:
        await are_decoding.wait()
        await cluster.workers[victim].kill()

    killing = asyncio.create_task(kill())
    await asyncio.gather(*map(ask_gateway, requests))
    are_decoding.set()  # if there were fewer tokens
    await killing


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """The sampling fields of a client's request: only those that differ from the defaults."""
    usual = SamplingParams()
    values = {each.name: getattr(params, each.name) for each in fields(SamplingParams)}
    said = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if grammar := said.pop("structured_output", None):
        name = "lark_grammar" if grammar.kind is GrammarKind.LARK else grammar.kind.value
        said[name] = grammar.source
    return {**said, "max_tokens": params.max_tokens}


# all of it


def make_requests(number: int) -> list[EngineRequest]:
    """Some requests, in random order. Their prompts begin with a token that does no worker harm (warm_worker.py)."""
    requests = [*REPEATING.requests(150), *FORCING.requests(50)]
    random.Random(0).shuffle(requests)
    return [
        replace(request, request_id=f"r{i}", prompt_token_ids=(BEGIN, *request.prompt_token_ids))
        for i, request in enumerate(requests[:number])
    ]


def shortened(request: EngineRequest) -> EngineRequest:
    params = request.sampling_params
    num_tokens, least = min(params.max_tokens, SHORT_ANSWER), min(params.min_tokens, SHORT_ANSWER)
    return replace(
        request,
        prompt_token_ids=(BEGIN, *request.prompt_token_ids[-SHORT_PROMPT:]),
        sampling_params=replace(params, max_tokens=num_tokens, min_tokens=least),
    )


def play(
    engine: str, methods: Iterable[str], ways: Iterable[str], num_prompts: int, model: str = "plain"
) -> list[str]:
    """Prints a row for each way, and returns what is wrong."""
    if is_interpreted := engine == "triton":
        from tests.factories.interpreted_engine import interpret_kernels  # changes this process for good

        interpret_kernels()
    row = "{:<7} {:<26} {:<12} {:>7} {:>7} {:>6} {:>7} {:>7} {:>7} {:>6}  {}"
    heads = ("engine", "method", "way", "prompts", "tokens", "wrong", "drafts", "right", "forced", "s", "")
    print(row.format(*heads), flush=True)
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        architecture, overrides = MODELS[model]
        if is_interpreted:
            overrides = SMALLER | overrides
        folder = make_model_dir(Path(name) / "model", architecture, **overrides)
        requests = make_requests(num_prompts)
        if is_interpreted:
            requests = [*map(shortened, requests)]
        plain = Scene(folder, requests, PLAIN, engine, NUM_GROUPS[model])
        expected = at_once(plain).token_ids
        for method, way in product(methods, ways):
            if _is_refused(METHODS[method], model, is_interpreted=is_interpreted):
                continue
            begin, (answer, must_happen) = time.monotonic(), WAYS[way]
            outcome = answer(replace(plain, speculation=METHODS[method]))
            found = list(_complaints(outcome, expected, "method" in METHODS[method], must_happen))
            complaints += [f"{engine}, {model}, {method}, {way}: {each}" for each in found]
            num_tokens, counts = sum(map(len, outcome.token_ids.values())), outcome.counts
            numbers = (len(expected), num_tokens, len(found), counts["drafts"], counts["right"])
            last = (counts.get("forced_tokens", "?"), f"{time.monotonic() - begin:.0f}")
            happened = f"{counts[must_happen]} {must_happen}" if must_happen else ""
            print(row.format(engine, method, way, *numbers, *last, happened), flush=True)
    return complaints


def _is_refused(speculation: Mapping[str, Any], model: str, *, is_interpreted: bool) -> bool:
    """A GPU's engine takes no forced tokens and no draft model. Windows give back KV that a draft model needs."""
    if speculation.get("method") == "draft_model":
        return is_interpreted or model == "windows"
    return is_interpreted and bool(speculation.get("forced_tokens"))


def _complaints(
    outcome: Outcome, expected: Mapping[str, list[int]], has_drafts: bool, must_happen: str
) -> Iterator[str]:
    for name, token_ids in expected.items():
        if outcome.token_ids.get(name) != token_ids:
            yield f"{name} is {outcome.token_ids.get(name)} instead of {token_ids}"
    if must_happen and not outcome.counts[must_happen]:
        yield f"no {must_happen}"
    if has_drafts and not 0 < outcome.counts["right"] < outcome.counts["drafts"]:
        yield f"{outcome.counts['right']} of {outcome.counts['drafts']} drafts were right"


def main() -> int:
    """Returns 1 if anything is wrong, otherwise 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=NUM_PROMPTS, default=[*NUM_PROMPTS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--model", choices=MODELS, default="plain", help="default %(default)s")
    parser.add_argument(
        "--prompts", type=int, choices=range(1, 201), metavar="N", help="default: 200 for cpu, 10 for triton"
    )
    options = parser.parse_args()
    # Rows that pad a step contain arbitrary memory; their results are not used.
    warnings.filterwarnings("ignore", "(overflow|invalid value) encountered", RuntimeWarning)
    complaints: list[str] = []
    for engine in sorted(options.engines):  # triton changes the process
        number = options.prompts or NUM_PROMPTS[engine]
        complaints += play(engine, options.methods, options.ways, number, options.model)
    print("\n".join(complaints) or "nothing is wrong")
    return int(bool(complaints))


if __name__ == "__main__":
    raise SystemExit(main())
