"""Which layers form a group: hand-computed examples, some of them of published models."""

import pytest

from baton.kv_groups import ONE_GROUP, KVGroups
from engine.layer_groups import group_layers, one_group


def windows(pattern: str, window: int = 512) -> list[int | None]:
    """`f` for full attention, `w` for a window."""
    return [None if kind == "f" else window for kind in pattern]


@pytest.mark.parametrize(
    ("pattern", "groups", "layers"),
    [
        ("ff", ONE_GROUP, ((0, 1),)),
        ("ww", KVGroups(0, 1, 512), ((0, 1),)),
        ("wf", KVGroups(1, 1, 512), ((1,), (0,))),
        ("wwf", KVGroups(1, 2, 512), ((2,), (0,), (1,))),
        ("wwwff", KVGroups(1, 2, 512), ((3, 4), (0, 1), (2,))),
    ],
)
def test_groups_have_as_many_layers_as_the_rarer_kind(
    pattern: str, groups: KVGroups, layers: tuple[tuple[int, ...], ...]
) -> None:
    found = group_layers(windows(pattern), 2048)
    assert (found.groups, found.layers) == (groups, layers)
    assert found.num_layers == len(layers[0])


def test_gemma_3_of_270m_has_one_full_group_and_five_with_windows() -> None:
    found = group_layers(windows("wwwwwf" * 3), 32_768)
    assert found.groups == KVGroups(1, 5, 512)
    assert found.num_layers == 3
    assert sorted(layer for layers in found.layers for layer in layers) == list(range(18))


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert group_layers(windows("wf", 2048), 2048) == one_group(2)
    assert group_layers(windows("wf", 2047), 2048).groups == KVGroups(1, 1, 2047)


def test_layers_with_several_windows_stay_together() -> None:
    assert group_layers([512, 1024, None], 2048) == one_group(3)
    assert group_layers([1, None], 2048) == one_group(2), "such a window holds no other token"
