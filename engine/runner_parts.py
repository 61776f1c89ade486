"""make_runner: a ModelRunner for a model on a CPU, with one attention for each KV group."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import StepBatch
from engine.drafts import Drafter
from engine.forward import PagedAttentions, TorchForward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.layer_groups import LayerGroups
from engine.layers.attention import Attention, HeadNorm
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


class GroupedAttention:
    """Attention of a model with several KV groups: one for each group, with the group's layers and blocks."""

    def __init__(
        self,
        groups: LayerGroups,
        architecture: ModelArchitecture,
        make: Callable[[ModelArchitecture], PagedAttentions],
    ) -> None:
        """`make`: makes one group's attention, for a model that has only the layers of this group."""
        self._attentions = [make(architecture.of_layers(layers)) for layers in groups.layers]
        self._places = groups.places

    def prepare(self, batch: StepBatch) -> Attention:
        steps = [attention.prepare(batch.of_group(group)) for group, attention in enumerate(self._attentions)]
        return GroupedStepAttention(steps, self._places)


class GroupedStepAttention:
    """Satisfies `engine.layers.attention.Attention` for one step."""

    def __init__(self, steps: Sequence[Attention], places: dict[int, tuple[int, int]]) -> None:
        """`places`: the group of each layer, and the layer's index in the group."""
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
