"""make_runner: a ModelRunner of the parts that the model's device computes with."""

from engine.forward import TorchForward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.paged_attention import PagedAttention
from engine.loading.loader import LoadedModel
from engine.runner import ModelRunner
from engine.sampler import Sampler, SharedSampler, TorchSampler


def make_runner(
    model: LoadedModel,
    pool: KVPool,
    host_blocks: HostBlocks | None = None,
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """`host_blocks` and `grammars`: see ModelRunner."""
    collectives = model.collectives
    attention = PagedAttention(pool, model.architecture, model.num_heads, model.dtype)
    sampler: Sampler = TorchSampler()
    return ModelRunner(
        TorchForward(model.decoder, attention, model.device),
        sampler if collectives.size == 1 else SharedSampler(sampler, collectives),
        host_blocks or HostBlocks(0, pool),
        pool.shape.block_size,
        grammars,
        samples=collectives.rank == 0,
    )
