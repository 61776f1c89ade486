"""LayerGroups: which layers form which KV group, and their places in its blocks; knows no tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv_groups import ONE_GROUP, KVGroups


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of each KV group. A block has room for as many layers as the largest group has.

    Groups of full attention come first, then groups with a window. The last group of each kind may be
    smaller.
    """

    groups: KVGroups
    layers: tuple[tuple[int, ...], ...]

    @property
    def num_layers(self) -> int:
        """For how many layers a block has room."""
        return max(map(len, self.layers))

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """The group of each layer, and the layer's index in the group's blocks."""
        return {
            layer: (group, index)
            for group, layers in enumerate(self.layers)
            for index, layer in enumerate(layers)
        }


def one_group(num_layers: int) -> LayerGroups:
    return LayerGroups(ONE_GROUP, (tuple(range(num_layers)),))


def group_layers(windows: Sequence[int | None], max_len: int) -> LayerGroups:
    """Groups with as many layers as the rarer kind has (full or windowed), as in vLLM.

    A window of `max_len` or more tokens counts as full attention. If layers have windows of different sizes,
    all layers form one group: attention masks the tokens outside of a window, and no block is freed early.
    """
    full = [layer for layer, window in enumerate(windows) if window is None or window >= max_len]
    windowed = [layer for layer in range(len(windows)) if layer not in set(full)]
    sizes = {windows[layer] for layer in windowed} - {None}
    if len(sizes) != 1 or sizes == {1}:
        return one_group(len(windows))
    (window,) = sizes
    assert window is not None
    num_layers = min(len(kind) for kind in (full, windowed) if kind)
    parts = [
        tuple(kind[first : first + num_layers])
        for kind in (full, windowed)
        for first in range(0, len(kind), num_layers)
    ]
    num_full = -(-len(full) // num_layers)
    return LayerGroups(KVGroups(num_full, len(parts) - num_full, window), tuple(parts))
