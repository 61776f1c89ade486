"""make_runner: a ModelRunner for a model on a CPU, with one attention for each KV group."""

from collections.abc import Mapping, Sequence

import torch

from engine.batch import StepBatch
from engine.drafts import Drafter
from engine.forward import PagedAttentions, TorchForward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.attention import Attention, HeadNorm
from engine.layers.native_attention import NativeAttention, is_supported
from engine.layers.native_backend import NativeBackend
from engine.layers.paged_attention import PagedAttention
from engine.loading.loader import LoadedModel
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
    """Makes the runner. `host_blocks`, `grammars`, `drafter` and `takes_forced`: see ModelRunner."""
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
    """Attention by Baton's own kernels if the model's backend has them and they support its heads; else by torch."""
    groups = model.layer_groups
    of_groups = [_attention_of(model, pool, group) for group in range(len(groups.layers))]
    return of_groups[0] if len(of_groups) == 1 else GroupedAttention(of_groups, groups.places)


def _attention_of(model: LoadedModel, pool: KVPool, group: int) -> PagedAttentions:
    """Attention of one KV group; it numbers only the layers of this group."""
    backend, architecture = model.backend, model.architecture.of_layers(model.layer_groups.layers[group])
    if isinstance(backend, NativeBackend) and is_supported(pool.shape, model.num_heads):
        return NativeAttention(backend.library, pool, architecture, model.num_heads, model.dtype, group)
    return PagedAttention(pool, architecture, model.num_heads, model.dtype, group)


class GroupedAttention:
    """Attention of a model with several KV groups."""

    def __init__(self, of_groups: Sequence[PagedAttentions], places: Mapping[int, tuple[int, int]]) -> None:
        """`of_groups`: the attention of each group. `places`: the group of each layer, and the layer's index in it."""
        self._of_groups = of_groups
        self._places = places

    def prepare(self, batch: StepBatch) -> Attention:
        return GroupedStepAttention([each.prepare(batch) for each in self._of_groups], self._places)


class GroupedStepAttention:
    """The attention of one step; an `Attention` of engine/layers/attention.py."""

    def __init__(self, steps: Sequence[Attention], places: Mapping[int, tuple[int, int]]) -> None:
        self._steps = steps
        self._places = places

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, index = self._places[layer]
        return self._steps[group](index, qkv_TPD, head_norm, sinks_Q)
