"""with_prefill_steps: how many tokens a prefill worker's step computes on a CPU if the configuration does not say."""

from pathlib import Path

from baton.config import BatonConfig
from engine.loading.stored_weights import is_quantized
from engine.native.instructions import machine_instructions
from engine.native.library import native_library

TOKENS_WITH_MATRIX_UNITS = 512
"""AMX multiplies bfloat16 so fast that a step of 128 tokens, the default, spends more time on reading the weights than
on its products. A step of 512 tokens takes 0.75 times the time of four steps of 128, and larger steps gain little more.
No decode waits for these steps."""


def with_prefill_steps(config: BatonConfig, model_path: Path) -> BatonConfig:
    """The configuration of a prefill worker, with larger steps where they are faster. `config` names the dtype, not
    `auto`."""
    scheduler = config.scheduler
    is_set = "max_num_batched_tokens" in scheduler.model_fields_set
    if is_set or not scheduler.splits_prompts or not _multiplies_by_matrix_units(config, model_path):
        return config
    num_tokens = max(TOKENS_WITH_MATRIX_UNITS, scheduler.max_num_seqs)
    larger = scheduler.with_values("scheduler", max_num_batched_tokens=num_tokens)
    return config.model_copy(update={"scheduler": larger})


def _multiplies_by_matrix_units(config: BatonConfig, model_path: Path) -> bool:
    """Whether matrix units multiply weights in bfloat16. With weights of fewer bits, reading does not limit the
    speed, so larger steps save no time."""
    instructions = machine_instructions()
    if config.engine.device != "cpu" or config.model.dtype != "bfloat16" or instructions is None:
        return False
    if "amx_bf16" not in instructions.needs or native_library() is None:
        return False
    quantization = config.model.quantization
    if quantization == "auto":
        return not is_quantized(model_path)
    return quantization == "none"
