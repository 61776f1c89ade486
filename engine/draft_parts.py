"""make_drafter: makes the configured drafter; load_draft: loads its draft model."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from baton.config import BatonConfig, SchedulerConfig, SpeculationConfig
from engine.draft_model import DraftModel
from engine.drafts import Drafter, NGramProposer, Proposer
from engine.forward import TorchForward
from engine.kv_cache import KVPool
from engine.loading.draft_check import check_draft, check_served, errors_of_draft
from engine.loading.loader import LoadedModel, load_model
from engine.loading.pretrained import default_cache_dir, resolve
from engine.loading.weights import OnLoaded
from engine.model_config import read_architecture
from engine.runner_parts import make_attention
from engine.sampler import TorchSampler

logger = logging.getLogger(__name__)

EQUAL_ROWS = {"cpu": 12.0, "cuda": 200.0}
"""By device: with this many rows, a step's arithmetic takes about as long as reading the model's weights."""
STEP_TIME = {4: 0.5, 8: 0.7, 16: 1.0}
"""By bits of most weights: the time of a decode step, divided by the time with 16 bits (docs/cpu.md)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, which guesses tokens for the served model."""

    model: LoadedModel
    shares_kv: bool
    """Whether the draft model consists of the served model's first layers, and so needs no KV pool of its own."""
    speculation: SpeculationConfig
    """The configuration of the guesses."""

    def block_bytes(self, block_size: int) -> int:
        """How many bytes of the draft model's KV belong to each block of the served model."""
        return 0 if self.shares_kv else self.model.kv_block_shape(block_size).size_bytes

    def num_spare_blocks(self, config: SchedulerConfig) -> int:
        """How many spare blocks each pool has; the scheduler does not know these blocks."""
        return self.speculation.num_spare_blocks(config.block_size, config.max_num_seqs)


def load_draft(
    config: BatonConfig, model_path: Path, model: LoadedModel, on_progress: OnLoaded | None = None
) -> Draft | None:
    """The draft model for `model`; None if none is configured, or on a rank that does not sample.

    `model_path`: the folder of `model`. ConfigError or ModelError if the draft model does not match `model`.
    """
    speculation = config.speculation
    if speculation.method != "draft_model" or model.collectives.rank > 0:
        return None
    check_served(speculation, model.architecture)
    if speculation.draft_layers is not None:
        first = _first_layers(model, speculation.draft_layers)
        return Draft(first, shares_kv=True, speculation=speculation)
    assert speculation.draft_model is not None
    with errors_of_draft():
        path = resolve(speculation.draft_model, default_cache_dir(os.environ))
        check_draft(read_architecture(path), path, model.architecture, model_path)
        quantization = speculation.draft_quantization or config.model.quantization
        draft = load_model(
            config.model.with_values("speculation", quantization=quantization),
            path,
            model.device,
            kv_cache_dtype=config.engine.kv_cache_dtype,
            on_progress=on_progress,
            max_model_len=config.scheduler.max_model_len,
        )
    longest = config.scheduler.max_model_len or model.max_model_len
    if draft.max_model_len < longest:
        logger.warning(
            "speculation.draft_model: %s was made for %d tokens, but a request may have %d; its guesses beyond %d "
            "tokens are rarely right, and save no time; use another draft model, or lower scheduler.max_model_len",
            *(path, draft.max_model_len, longest, draft.max_model_len),
        )
    return Draft(draft, shares_kv=False, speculation=speculation)


def make_drafter(
    speculation: SpeculationConfig,
    config: SchedulerConfig,
    model: LoadedModel,
    pool: KVPool,
    draft: Draft | None,
) -> Drafter | None:
    """Makes the configured drafter; None if none is configured. `config`: the completed configuration.

    `pool`: the served model's pool, whose last blocks are spare blocks.
    """
    proposer: Proposer
    if draft is not None:
        proposer = _make_draft_model(draft, config, model, pool)
    elif speculation.method == "ngram":
        proposer = NGramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    else:
        return None
    equal_rows = EQUAL_ROWS[model.device.type]
    return Drafter(proposer, speculation.num_drafts, config.max_num_batched_tokens, equal_rows)


def _make_draft_model(draft: Draft, config: SchedulerConfig, model: LoadedModel, pool: KVPool) -> DraftModel:
    shape = draft.model.kv_block_shape(config.block_size)
    own_pool = pool if draft.shares_kv else KVPool(pool.num_blocks, shape, model.device)
    cost = cost_of(draft.model, model)
    logger.info(
        "a draft model of %d layers guesses up to %d tokens; a guess takes about %.2f of the time of a token, and "
        "the KV of the draft model takes %s",
        draft.model.architecture.num_layers,
        draft.speculation.num_drafts,
        cost,
        "no memory" if draft.shares_kv else f"{pool.num_blocks * shape.size_bytes / 2**20:,.0f} MiB",
    )
    spare_blocks = range(pool.num_blocks - draft.num_spare_blocks(config), pool.num_blocks)
    return DraftModel(
        TorchForward(draft.model.decoder, make_attention(draft.model, own_pool), model.device),
        TorchSampler(),
        config.block_size,
        spare_blocks,
        draft.speculation.num_drafts,
        cost,
        shares_kv=draft.shares_kv,
    )


def _first_layers(model: LoadedModel, num_layers: int) -> LoadedModel:
    architecture = model.architecture.of_layers(range(num_layers))
    return replace(model, architecture=architecture, decoder=model.decoder.first_layers(num_layers))


def cost_of(draft: LoadedModel, model: LoadedModel) -> float:
    """The time of a draft, divided by the served model's time for a token. Each time is estimated by the time to read
    the model's matrices."""
    return _token_time(draft) / _token_time(model)


def _token_time(model: LoadedModel) -> float:
    a = model.architecture
    return (a.weights_per_token + a.vocab_size * a.hidden_size) * STEP_TIME[model.weight_bits]
