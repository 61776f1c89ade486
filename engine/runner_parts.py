"""make_runner: a ModelRunner for a model on a CPU."""

from engine.drafts import Drafter
from engine.forward import PagedAttentions, TorchForward
from engine.grammars.compiler import GrammarCompiler
from engine.grouped_attention import GroupedAttention
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.native_attention import NativeAttention, is_supported
from engine.layers.paged_attention import PagedAttention
from engine.loading.loader import LoadedModel
from engine.model_config import ModelArchitecture
from engine.native.library import native_library
from engine.runner import ModelRunner
from engine.sampler import TorchSampler


def make_runner(
    model: LoadedModel,
    pool: KVPool,
    host_blocks: HostBlocks | None = None,
    grammars: GrammarCompiler | None = None,
    drafter: Drafter | None = None,
    *,
    takes_forced: bool = False,
) -> ModelRunner:
    """`host_blocks`, `grammars`, `drafter` and `takes_forced`: see ModelRunner."""
    return ModelRunner(
        TorchForward(model.decoder, make_attention(model, pool), model.device),
        TorchSampler(model.collectives),
        host_blocks or HostBlocks(0, pool),
        pool.shape.block_size,
        grammars,
        drafter=drafter,
        takes_forced=takes_forced,
        samples=model.collectives.rank == 0,
        kv_groups=model.layer_groups.groups,
    )


def make_attention(model: LoadedModel, pool: KVPool) -> PagedAttentions:
    """Attention by Baton's own kernels if they exist here and support the model's heads; else by torch."""
    library = native_library()

    def make(architecture: ModelArchitecture) -> PagedAttentions:
        if library is not None and is_supported(pool.shape, model.num_heads):
            return NativeAttention(library, pool, architecture, model.num_heads, model.dtype)
        return PagedAttention(pool, architecture, model.num_heads, model.dtype)

    groups = model.layer_groups
    if len(groups.layers) == 1:
        return make(model.architecture)
    return GroupedAttention(groups, model.architecture, make)
