"""make_runner: a ModelRunner for a model on a CPU."""

from engine.forward import TorchForward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.paged_attention import PagedAttention
from engine.loading.loader import LoadedModel
from engine.runner import ModelRunner
from engine.sampler import TorchSampler


def make_runner(
    model: LoadedModel,
    pool: KVPool,
    host_blocks: HostBlocks | None = None,
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """`host_blocks` and `grammars`: see ModelRunner."""
    attention = PagedAttention(pool, model.architecture, model.num_heads, model.dtype)
    return ModelRunner(
        TorchForward(model.decoder, attention, model.device),
        TorchSampler(model.collectives),
        host_blocks or HostBlocks(0, pool),
        pool.shape.block_size,
        grammars,
        samples=model.collectives.rank == 0,
    )
