"""Loading a draft model: what does not fit is refused by name, and its KV takes a part of the memory."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import BatonConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from baton.errors import ConfigError, ModelError
from engine.capacity import rank_capacity
from engine.collectives import SilentRank
from engine.draft_parts import STEP_TIME, Draft, cost_of, load_draft, make_drafter
from engine.kv_cache import KVPool
from engine.loading.footprint import footprint
from engine.loading.loader import LoadedModel, load_model
from engine.loading.stored_weights import kept_bits
from engine.native.library import native_library
from tests.factories.families import QWEN3_MOE
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_draft_pair, make_model_dir
from tests.factories.quantized_checkpoints import KINDS, make_quantized

CPU = torch.device("cpu")
FLOAT32 = ModelConfig(dtype="float32")
MIB = 2**20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_draft_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> LoadedModel:
    return load_model(FLOAT32, pair[0], CPU)


def configured(**keys: object) -> SpeculationConfig:
    return SpeculationConfig.model_validate({"method": "draft_model", "num_speculative_tokens": 3, **keys})


def draft_of(model: LoadedModel, model_path: Path, **keys: object) -> Draft:
    draft = load_draft(BatonConfig(model=FLOAT32, speculation=configured(**keys)), model_path, model)
    assert draft is not None
    return draft


def test_layers_that_the_model_has_not_are_refused(model: LoadedModel, pair: tuple[Path, Path]) -> None:
    assert draft_of(model, pair[0], draft_layers=6).model.architecture.num_layers == 6
    with pytest.raises(
        ConfigError, match=r"speculation.draft_layers: got 7, but the served model has 6 layers"
    ):
        draft_of(model, pair[0], draft_layers=7)


def test_a_model_that_is_not_there_is_named(model: LoadedModel, pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"speculation.draft_model: model '/nowhere' is neither a folder"):
        draft_of(model, pair[0], draft_model="/nowhere")


def test_models_with_windows_are_refused(pair: tuple[Path, Path], model: LoadedModel, tmp_path: Path) -> None:
    """These models give back KV that a draft model would read."""
    windowed = make_model_dir(tmp_path / "windowed", "mistral", sliding_window=7, vocab_size=300)
    with pytest.raises(
        ConfigError, match=r"speculation.method: got 'draft_model', but the served model has sliding"
    ):
        draft_of(load_model(FLOAT32, windowed, CPU), windowed, draft_layers=1)
    with pytest.raises(ModelError, match=r"speculation.draft_model: .*windowed has sliding windows"):
        draft_of(model, pair[0], draft_model=str(windowed))


def test_another_vocabulary_is_refused(model: LoadedModel, pair: tuple[Path, Path], tmp_path: Path) -> None:
    larger = make_model_dir(tmp_path / "larger", num_hidden_layers=1, vocab_size=320)
    with pytest.raises(
        ModelError, match=r"draft_model: .*larger has 320 tokens .* but the served model .*whole has 300"
    ):
        draft_of(model, pair[0], draft_model=str(larger))
    other = make_model_dir(tmp_path / "other", num_hidden_layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ModelError,
        match=r"draft_model: .*the vocabulary of .*other differs from that of the served model .*whole;",
    ):
        draft_of(model, pair[0], draft_model=str(other))
    (other / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError, match=r"draft_model: cannot read the vocabulary in .*other/tokenizer.json"
    ):
        draft_of(model, pair[0], draft_model=str(other))


@pytest.mark.parametrize(("max_model_len", "is_said"), [(None, True), (513, True), (512, False)])
def test_a_draft_model_for_shorter_requests_is_said(
    model: LoadedModel,
    pair: tuple[Path, Path],
    tmp_path: Path,
    max_model_len: int | None,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The served model has 1024 positions."""
    short = make_model_dir(tmp_path, num_hidden_layers=1, max_position_embeddings=512)
    scheduler = SchedulerConfig(max_model_len=max_model_len)
    speculation = configured(draft_model=str(short))
    load_draft(BatonConfig(model=FLOAT32, scheduler=scheduler, speculation=speculation), pair[0], model)
    said = f"was made for 512 tokens, but a request may have {max_model_len or 1024}; its guesses beyond 512"
    assert (said in caplog.text) == is_said


def test_a_draft_model_is_kept_in_as_many_bits_as_asked(model: LoadedModel, pair: tuple[Path, Path]) -> None:
    kept = [
        draft_of(model, pair[0], draft_model=str(pair[0]), **keys).model.quantization
        for keys in ({}, {"draft_quantization": "int4"})
    ]
    assert kept == [None, "int4"]


@pytest.mark.parametrize("scheduler", [{}, {"num_blocks": 12}], ids=str)
def test_rank_0_which_also_has_a_draft_models_kv_says_how_many_blocks_a_worker_has(
    pair: tuple[Path, Path], scheduler: dict[str, Any]
) -> None:
    speculation = {"method": "draft_model", "draft_model": str(pair[1])}
    values = {"model": {"dtype": "float32"}, "engine": {"tensor_parallel": 2}}
    config = BatonConfig.from_mapping({**values, "speculation": speculation, "scheduler": scheduler})
    half = load_model(config.model, pair[0], CPU, collectives=SilentRank(0, 2))
    draft = load_draft(config, pair[0], half)
    reckoned = rank_capacity(config.engine, config.scheduler, half, draft=draft).scheduler_config
    assert reckoned.num_blocks is not None
    assert footprint(config, *pair).num_kv_tokens == (reckoned.num_blocks - 1) * reckoned.block_size


def test_memory_holds_the_kv_of_both_models_and_of_drafts(
    model: LoadedModel, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A token takes 256 bytes in each layer."""
    scheduler = SchedulerConfig(max_num_seqs=10, block_size=2)
    engine = EngineConfig(kv_cache_memory_mib=1)

    def num_blocks(draft: Draft | None) -> int | None:
        return rank_capacity(engine, scheduler, model, 3, draft).scheduler_config.num_blocks

    layer, spare = 2 * 256, 10 * 2
    assert num_blocks(None) == MIB // (6 * layer)
    assert num_blocks(draft_of(model, pair[0], draft_layers=2)) == MIB // (6 * layer) - spare
    other = draft_of(model, pair[0], draft_model=str(pair[1]))
    assert num_blocks(other) == MIB // (8 * layer) - spare
    little = SchedulerConfig(max_num_seqs=1000, block_size=2)
    with pytest.raises(
        ConfigError, match="too little for two blocks of this model beside 2000 blocks for drafts"
    ):
        rank_capacity(engine, little, model, 3, other)
    with caplog.at_level(logging.INFO, logger="engine.draft_parts"):
        pool = KVPool(2048, model.kv_block_shape(2), CPU)
        make_drafter(
            configured(draft_layers=2), scheduler, model, pool, draft_of(model, pair[0], draft_layers=2)
        )
        make_drafter(configured(draft_model="x"), scheduler, model, pool, other)
    assert (
        "a draft model of 2 layers guesses up to 3 tokens; a guess takes about 0.39 of the time of a token"
        in caplog.text
    )
    assert "the KV of the draft model takes no memory" in caplog.text
    assert "the KV of the draft model takes 2 MiB" in caplog.text


def test_a_draft_of_a_mixture_costs_the_experts_that_a_token_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer has an MLP of 128, two have 3 of 6 experts of 32. Heads take 192 rows of 64 numbers, logits 300."""
    path = make_model_dir(tmp_path, "qwen3_moe", **QWEN3_MOE, mlp_only_layers=[0])
    model = load_model(FLOAT32, path, CPU)
    draft = draft_of(model, path, draft_layers=1)
    assert draft.model.architecture.mixtures == (None,)
    with caplog.at_level(logging.INFO, logger="engine.draft_parts"):
        pool = KVPool(64, model.kv_block_shape(2), CPU)
        make_drafter(configured(draft_layers=1), SchedulerConfig(block_size=2), model, pool, draft)
    first, rest = 192 + 3 * 128, 2 * (192 + 3 * 3 * 32)
    assert (
        f"a guess takes about {(first + 300) / (first + rest + 300):.2f} of the time of a token"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("kind", "num_bits"),
    [
        ("int4, groups of 32", 4),
        ("int8 by channel", 8),
        ("gptq, 4 bits", 4),
        ("gptq, 8 bits", 8),
        ("awq", 4),
        ("fp8 by channel", 16),  # which a CPU dequantizes
    ],
)
def test_a_guess_costs_what_the_bits_of_the_draft_model_take(
    kind: str, num_bits: int, tmp_path: Path
) -> None:
    if native_library() is None:
        pytest.skip("needs a compiler")
    source = make_model_dir(tmp_path / "source", hidden_size=128, intermediate_size=256)
    folder, _ = make_quantized(tmp_path / "quantized", source, KINDS[kind])
    served, draft = (load_model(FLOAT32, path, CPU) for path in (source, folder))
    assert draft.weight_bits == num_bits
    assert cost_of(draft, served) == STEP_TIME[num_bits]


@pytest.mark.parametrize(("kind", "num_bits"), [("Q4_1", 4), ("Q8_0", 8), ("Q5_0", 8), ("F16", 16)])
def test_most_weights_of_a_gguf_file_say_what_a_guess_costs(kind: str, num_bits: int, tmp_path: Path) -> None:
    make_gguf(tmp_path / "model.gguf", make_model_dir(tmp_path / "source"), kind)
    assert kept_bits("gguf", tmp_path) == num_bits


@pytest.mark.parametrize(
    ("keys", "num_bits"), [({"draft_quantization": "int4"}, 4), ({"draft_quantization": "int8"}, 8), ({}, 16)]
)
def test_a_draft_model_that_is_rounded_while_it_loads_costs_less(
    model: LoadedModel, pair: tuple[Path, Path], keys: dict[str, str], num_bits: int
) -> None:
    draft = draft_of(model, pair[0], draft_model=str(pair[0]), **keys)
    assert cost_of(draft.model, model) == STEP_TIME[num_bits]
