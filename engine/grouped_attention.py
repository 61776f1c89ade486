"""GroupedAttention: attention of a model with several KV groups over one pool; knows no block."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import StepBatch
from engine.forward import PagedAttentions
from engine.layer_groups import LayerGroups
from engine.layers.attention import Attention, HeadNorm
from engine.model_config import ModelArchitecture


class GroupedAttention:
    """Makes one attention for each group, with the group's layers and blocks."""

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
