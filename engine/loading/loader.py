"""load_model: loads a model's folder to a device, with the facts that the rest of the engine needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import KVCacheDtype, ModelConfig
from baton.errors import ConfigError, ModelError
from engine.collectives import SINGLE_RANK, Collectives
from engine.eos_tokens import read_eos_token_ids
from engine.kv_cache import KVBlockShape
from engine.layer_groups import LayerGroups, group_layers
from engine.layers.backend import Backend
from engine.layers.fp8 import FP8
from engine.layers.linear import has_fp8_units
from engine.layers.native_backend import NativeBackend
from engine.layers.scaled_attention import KVScale
from engine.layers.torch_backend import TorchBackend
from engine.loading.demands import check_quantization, check_shares
from engine.loading.digest import model_digest
from engine.loading.gguf_folder import gguf_of
from engine.loading.gguf_weights import GgufWeights
from engine.loading.kv_scales import ENDINGS, digest_of, read_kv_scales
from engine.loading.quantized_checkpoint import OutlinedCheckpoint, QuantizedCheckpoint
from engine.loading.quantized_weights import Bits, QuantizedWeights
from engine.loading.stored_head import as_stored
from engine.loading.stored_weights import BITS_OF_FLOATS, keeps_bits, kept_bits, quantization_of
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weight_stream import CudaCopies
from engine.loading.weights import (
    CheckpointWeights,
    DummyWeights,
    FileWeights,
    OnLoaded,
    Take,
    TakeRecorder,
    WeightSource,
)
from engine.model_config import ModelArchitecture, check_device, read_architecture
from engine.models.decoder import Decoder
from engine.native.library import native_library
from engine.quantization_config import FIRST_WITH_FP8

BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
"""Values of `model.quantization`, and their bits."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    architecture: ModelArchitecture
    decoder: Decoder
    backend: Backend
    """The kernels that compute the model."""
    collectives: Collectives
    """Connects the ranks that share the model; each rank has an equal part of the heads."""
    device: torch.device
    dtype: torch.dtype
    """Data type of activations, and of weights that are not quantized."""
    kv_dtype: torch.dtype
    """Data type of the KV cache."""
    eos_token_ids: tuple[int, ...]
    digest: str
    """Identifies config and weights, for KVFingerprint."""
    quantization: str | None = None
    """How matrices are stored in memory; None: as numbers of `dtype`."""
    weight_bits: int = BITS_OF_FLOATS
    """The bits of most weights in memory; see `kept_bits`."""

    @property
    def max_model_len(self) -> int:
        """The most tokens that prompt and output may have together: the number of the model's positions."""
        return self.architecture.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def num_heads(self) -> int:
        """This rank's query heads."""
        return self.architecture.num_heads // self.collectives.size

    @property
    def layer_groups(self) -> LayerGroups:
        """Which layers form which KV group. The layers of a group have their KV in the same blocks."""
        return group_layers(self.architecture.sliding_windows, self.architecture.max_position_embeddings)

    def kv_block_shape(self, block_size: int) -> KVBlockShape:
        """The shape of a block of `block_size` tokens in this rank's KV pool."""
        a = self.architecture
        num_layers, num_kv_heads = self.layer_groups.num_layers, a.kv_heads_on(self.collectives.size)
        is_latent = a.latent is not None
        return KVBlockShape(num_layers, num_kv_heads, block_size, a.head_dim, self.kv_dtype, is_latent)


def load_model(
    config: ModelConfig,
    path: Path,
    device: torch.device,
    backend: Backend | None = None,
    *,
    kv_cache_dtype: KVCacheDtype = "auto",
    collectives: Collectives = SINGLE_RANK,
    expert_parallel: bool = False,
    on_progress: OnLoaded | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads the folder at `path`; ModelError says what is missing, misshapen or not supported.

    `config` gives dtype, quantization and load format. `config.path` may be a name, since the caller has
    resolved it to `path`. `backend` provides the kernels; None means those of the device. `on_progress` is
    called for each tensor of a checkpoint. If ranks share the model, this loads only this rank's part. With
    `expert_parallel` the part consists of whole experts, instead of a share of each expert. `max_model_len`:
    see `read_architecture`.

    Weights reach the device in the order in which the model is built. On a CPU they come from memory-mapped
    files; for a GPU they are read ahead. So only the current layer, and weights that were read ahead, are in
    memory twice.
    """
    dtype, kv_dtype = DTYPES[config.dtype], kv_dtype_of(config, kv_cache_dtype, device)
    is_dummy = config.load_format == "dummy"
    architecture = read_architecture(path, max_model_len)
    if not is_dummy:
        architecture = as_stored(architecture, path)
    check_device(architecture, device.type)
    check_quantization(config, device.type)
    check_shares(architecture, collectives.size, expert_parallel=expert_parallel)
    backend = backend or _make_backend(device)
    quantization = _kept_as(config, path, device)
    kv_scales = _kv_scales(config, path, architecture, kv_dtype)
    parts = _DecoderParts(config, architecture, backend, collectives, kv_scales, expert_parallel)
    decoder = (
        parts.decoder(DummyWeights(dtype, device))
        if is_dummy
        else _load_decoder(parts, path, device, quantization, on_progress)
    )
    return LoadedModel(
        architecture=architecture,
        decoder=decoder,
        backend=backend,
        collectives=collectives,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos_token_ids=read_eos_token_ids(path),
        digest=model_digest(
            path,
            dummy_device=device if is_dummy else None,
            quantization=quantization,
            activations=None if kv_dtype is dtype else config.dtype,
            rotation=_rotation(architecture),
            kv_scales=digest_of(kv_scales),
        ),
        quantization=quantization,
        weight_bits=kept_bits(quantization, path),
    )


def _rotation(architecture: ModelArchitecture) -> str | None:
    """The part of the rotation that config.json does not determine: which of LongRoPE's factors are used."""
    keys = {rope.divisors_key for rope in architecture.ropes if rope is not None}
    return "-".join(sorted(keys)) or None


def outline_model(
    config: ModelConfig,
    path: Path,
    backend: Backend,
    *,
    kv_cache_dtype: KVCacheDtype = "auto",
    collectives: Collectives = SINGLE_RANK,
    expert_parallel: bool = False,
) -> LoadedModel:
    """The model as `load_model` makes it, but of tensors without memory (meta tensors), and without a digest.

    Its steps compute nothing, but launch the same kernels.
    """
    dtype, kv_dtype = DTYPES[config.dtype], kv_dtype_of(config, kv_cache_dtype, torch.device("cuda"))
    is_dummy = config.load_format == "dummy"
    architecture = read_architecture(path) if is_dummy else as_stored(read_architecture(path), path)
    quantization = None if is_dummy else quantization_of(path)
    source: WeightSource = TakeRecorder(dtype)
    if quantization is not None and _kept_as(config, path, torch.device("meta")) is not None:
        source = OutlinedCheckpoint(path, quantization, dtype)
    kv_scales = _kv_scales(config, path, architecture, kv_dtype)
    parts = _DecoderParts(config, architecture, backend, collectives, kv_scales, expert_parallel)
    return LoadedModel(
        architecture=architecture,
        decoder=parts.decoder(source),
        backend=backend,
        collectives=collectives,
        device=torch.device("meta"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos_token_ids=(),
        digest="",
    )


def _make_backend(device: torch.device) -> Backend:
    """Baton's own kernels; plain torch on a CPU for which there are no kernels."""
    if device.type == "cpu":
        library = native_library()
        return TorchBackend() if library is None else NativeBackend(library)
    from engine.layers.triton_backend import TritonBackend  # without a GPU, Triton may be missing

    return TritonBackend()


def takes_of(
    architecture: ModelArchitecture, collectives: Collectives = SINGLE_RANK, *, expert_parallel: bool = False
) -> list[Take]:
    """The tensors that a rank's model of this architecture requests from its weight source, in order."""
    recorder = TakeRecorder()
    Decoder(architecture, recorder, TorchBackend(), collectives=collectives, expert_parallel=expert_parallel)
    return recorder.takes


def _kv_scales(
    config: ModelConfig, path: Path, architecture: ModelArchitecture, kv_dtype: torch.dtype
) -> dict[str, KVScale]:
    """The scales of a checkpoint; empty unless the KV cache has 8 bits, and so needs them."""
    if kv_dtype is not FP8 or config.load_format == "dummy" or gguf_of(path) is not None:
        return {}
    scales = read_kv_scales(path)
    if scales and architecture.latent is not None:
        raise ModelError(
            f"{path}: {min(scales)} has scales, which are not supported in models whose heads share a latent; set "
            "engine.kv_cache_dtype to 'auto', which needs no scales"
        )
    return scales


@dataclass(frozen=True, slots=True)
class _DecoderParts:
    """All that a rank's decoder needs besides weights."""

    config: ModelConfig
    architecture: ModelArchitecture
    backend: Backend
    collectives: Collectives
    kv_scales: Mapping[str, KVScale]
    expert_parallel: bool

    def decoder(self, weights: WeightSource) -> Decoder:
        quantization, backend = self.config.quantization, self.backend
        bits = BITS.get(quantization)
        return Decoder(
            self.architecture,
            weights if bits is None else QuantizedWeights(weights, bits),
            backend,
            backend.fp8_linear if quantization == "fp8" else backend.linear,
            self.collectives,
            self.kv_scales,
            expert_parallel=self.expert_parallel,
        )


def _load_decoder(
    parts: _DecoderParts,
    path: Path,
    device: torch.device,
    kept_as: str | None,
    on_progress: OnLoaded | None,
) -> Decoder:
    """Builds the decoder with the weights in `path`. `kept_as`: see `_kept_as`."""
    architecture, expert_parallel = parts.architecture, parts.expert_parallel
    takes = takes_of(architecture, parts.collectives, expert_parallel=expert_parallel)
    with _open_weights(parts, path, device, kept_as, takes, on_progress) as weights:
        decoder = parts.decoder(weights)
        # The model need not read: buffers of older checkpoints, a copy of the embeddings in a tied model, and
        # scales of KV, which `read_kv_scales` reads.
        tied = ("lm_head.weight",) if architecture.tie_word_embeddings else ()
        allowed = (".rotary_emb.inv_freq", *ENDINGS, *tied)
        elsewhere = takes_of(architecture) if expert_parallel else ()
        weights.check_all_taken(allowed=allowed, unread=architecture.unread_tensors, elsewhere=elsewhere)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees temporary memory: the size of the KV pool depends on free memory
    return decoder


def kv_dtype_of(config: ModelConfig, kv_cache_dtype: KVCacheDtype, device: torch.device) -> torch.dtype:
    """The cache's dtype. ConfigError if no attention on this device supports it with the model's dtype."""
    if kv_cache_dtype == "fp8":
        return FP8
    if kv_cache_dtype == "bfloat16" and config.dtype != "bfloat16":
        if config.dtype != "float32" or device.type != "cpu":
            raise ConfigError(
                "engine.kv_cache_dtype: 'bfloat16' is only for engine.device 'cpu' and model.dtype 'float32'; with "
                f"{device.type!r} and {config.dtype!r}, use 'auto' or 'fp8'"
            )
        return torch.bfloat16
    return DTYPES[config.dtype]


def check_fp8(config: ModelConfig, kv_cache_dtype: KVCacheDtype, device: torch.device) -> None:
    """ConfigError if a key asks for 8-bit floats that the kernels of this GPU do not support."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    for key, value in (
        ("model.quantization", config.quantization),
        ("engine.kv_cache_dtype", kv_cache_dtype),
    ):
        if value == "fp8" and capability < FIRST_WITH_FP8:
            raise ConfigError(
                f"{key}: 'fp8' needs a GPU of compute capability 8.9 or newer (Ada, Hopper); this one has "
                f"{'.'.join(map(str, capability))}. Use 'auto'"
            )


def _kept_as(config: ModelConfig, path: Path, device: torch.device) -> str | None:
    """How matrices are stored in memory; None: as numbers of the model's dtype.

    Without Baton's own kernels, torch would dequantize groups at every step. So `auto` keeps groups only for these
    kernels.
    """
    if config.quantization != "auto" or config.load_format == "dummy":
        return None if config.quantization in ("auto", "none") else config.quantization
    multiplies_groups = device.type == "cpu" and native_library() is not None
    if gguf_of(path) is not None:
        return "gguf" if multiplies_groups else None
    if (quantization := quantization_of(path)) is None:
        return None
    multiplies_fp8 = has_fp8_units(device, DTYPES[config.dtype])
    stays = keeps_bits(path, quantization, in_groups=multiplies_groups, in_fp8=multiplies_fp8)
    return quantization.method if stays else None


def _open_weights(
    parts: _DecoderParts,
    path: Path,
    device: torch.device,
    kept_as: str | None,
    takes: Sequence[Take],
    on_progress: OnLoaded | None,
) -> FileWeights:
    dtype, head_dim = DTYPES[parts.config.dtype], parts.architecture.head_dim
    if (gguf := gguf_of(path)) is not None:
        keeps = kept_as in ("gguf", *BITS)
        return GgufWeights(
            gguf, dtype, device, head_dim, keeps_groups=keeps, takes=takes, on_progress=on_progress
        )

    def open_stored(takes: Sequence[Take], dtype: torch.dtype | None = None) -> FileWeights:
        if device.type == "cuda":
            return StreamedWeights(path, dtype, takes, CudaCopies(device), on_progress)
        return CheckpointWeights(path, dtype, takes, on_progress)

    if (quantization := quantization_of(path)) is None:
        return open_stored(takes, dtype)
    keeps = kept_as is not None
    return QuantizedCheckpoint(
        path,
        quantization,
        dtype,
        takes,
        open_stored,
        keeps_groups=keeps and device.type == "cpu" and kept_as != "fp8",
        keeps_fp8=keeps and (device.type == "cuda" or kept_as == "fp8"),
    )
