"""load_model: a Hugging Face folder becomes a model on a device, with the facts the rest of the engine needs."""

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import ModelConfig
from engine.device import make_backend
from engine.kv_cache import KVBlockShape
from engine.layers.backend import Backend
from engine.model_config import ModelArchitecture, read_architecture, read_eos_token_ids
from engine.models.llama import LlamaForCausalLM
from engine.weights import CheckpointWeights, DummyWeights, model_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    architecture: ModelArchitecture
    decoder: LlamaForCausalLM
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    digest: str
    """Identifies config and weights, for KVFingerprint."""

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that the model's positions allow."""
        return self.architecture.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    def kv_block_shape(self, block_size: int) -> KVBlockShape:
        """What `block_size` tokens take in the KV pool, whose dtype is the model's."""
        a = self.architecture
        return KVBlockShape(a.num_layers, a.num_kv_heads, block_size, a.head_dim, self.dtype)


def load_model(
    config: ModelConfig, path: Path, device: torch.device, backend: Backend | None = None
) -> LoadedModel:
    """Loads the folder at `path`; ModelError says what is missing, misshapen or not supported.

    `config` gives dtype and load format; its own `path` may be a mere name, which whoever calls has looked up.
    `backend` has the kernels to run it with; None takes those of the device.

    Weights stream through memory-mapped files in the order the model is built, so nothing is held twice except the
    layer under way.
    """
    dtype = DTYPES[config.dtype]
    architecture = read_architecture(path)
    is_dummy = config.load_format == "dummy"
    backend = backend or make_backend(device)
    decoder = (
        LlamaForCausalLM(architecture, DummyWeights(dtype), backend)
        if is_dummy
        else _load_decoder(path, architecture, dtype, backend)
    )
    return LoadedModel(
        architecture=architecture,
        decoder=decoder,
        device=device,
        dtype=dtype,
        eos_token_ids=read_eos_token_ids(path),
        digest=model_digest(path, has_weights=not is_dummy),
    )


def _load_decoder(
    path: Path, architecture: ModelArchitecture, dtype: torch.dtype, backend: Backend
) -> LlamaForCausalLM:
    with CheckpointWeights(path, dtype) as weights:
        decoder = LlamaForCausalLM(architecture, weights, backend)
        # Buffers of older checkpoints, and a copy of the embeddings that a tied model has no use for.
        tied = ("lm_head.weight",) if architecture.tie_word_embeddings else ()
        weights.check_all_taken(allowed=(".rotary_emb.inv_freq", *tied))
    return decoder
