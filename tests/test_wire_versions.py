"""A plane's version counts up when one of its messages changes: fields travel by position, so the version guards them.

tests/data/wire_versions.json records each plane's version with the fields of every message, and of all that they hold.
`python -m tests.test_wire_versions` records them anew after a change.
"""

import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from baton.kv import PROTOCOL_VERSION
from baton.messages import control, control_codec, request_plane
from cluster.on_ray import actors
from kv_transfer.protocol import messages as kv
from kv_transfer.transport.nixl_description import Description

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
RECORD = Path(__file__).parent / "data" / "wire_versions.json"

Layout = dict[str, list[str]]
"""Of each dataclass `field: type` in order, of each enumeration its values."""


@dataclass(frozen=True, slots=True)
class Plane:
    constant: str
    """Where its version is."""
    version: int
    messages: tuple[type[Any], ...]
    counts_with: Mapping[str, int] = field(default_factory=dict)
    """The versions of other planes, by constant. When one of them changes, this plane's version must increase, too."""

    @property
    def record(self) -> dict[str, Any]:
        counts_with = {"counts with": dict(self.counts_with)} if self.counts_with else {}
        return {"version": self.version, **counts_with, "layout": layout_of(*self.messages)}


CONTROL_REQUESTS = tuple(
    kind
    for kind in {**vars(control), **vars(actors)}.values()
    if isinstance(kind, type)
    and issubclass(kind, control.ControlRequest)
    and kind is not control.ControlRequest
)
"""The requests to controllers and workers, and those to a worker's actor of Ray."""

PLANES = {
    "request plane": Plane(
        "REQUEST_PLANE_VERSION in baton/messages/request_plane.py",
        request_plane.REQUEST_PLANE_VERSION,
        get_args(request_plane.ToWorker | request_plane.ToGateway),
    ),
    "KV plane": Plane(
        "PROTOCOL_VERSION in baton/kv.py",
        PROTOCOL_VERSION,
        (*get_args(kv.ToProducer | kv.ToConsumer), Description),
    ),
    "control plane": Plane(
        "CONTROL_PLANE_VERSION in baton/messages/control.py",
        control.CONTROL_PLANE_VERSION,
        (
            control_codec.CallFrame,
            control_codec.AnswerFrame,
            control_codec.FailureFrame,
            *CONTROL_REQUESTS,
            *filter(is_dataclass, map(control.answer_type, CONTROL_REQUESTS)),
        ),
        counts_with={"REQUEST_PLANE_VERSION": request_plane.REQUEST_PLANE_VERSION},
    ),
}


def layout_of(*kinds: type[Any]) -> Layout:
    """The layout of these messages, and of every dataclass and enumeration in them, sorted by name."""
    layout: Layout = {}
    ahead = list(kinds)
    while ahead:
        kind = ahead.pop()
        if kind.__name__ in layout:
            continue
        if issubclass(kind, Enum):
            layout[kind.__name__] = [repr(member.value) for member in kind]
            continue
        hints = get_type_hints(kind)
        layout[kind.__name__] = [f"{field.name}: {spelled(hints[field.name])}" for field in fields(kind)]
        ahead += [held for field in fields(kind) for held in held_by(hints[field.name])]
    return dict(sorted(layout.items()))


def spelled(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(map(spelled, get_args(hint)))
    if arguments := get_args(hint):
        return f"{get_origin(hint).__name__}[{', '.join(map(spelled, arguments))}]"
    return "..." if hint is Ellipsis else "None" if hint is type(None) else str(hint.__name__)


def held_by(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, Enum)):
        yield hint
    for argument in get_args(hint):
        yield from held_by(argument)


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def complaint(name: str, plane: Plane, record: dict[str, Any] | None) -> str | None:
    """What to do before this plane may have its present messages; None if nothing."""
    if record is None:
        return f"the {name} is not in {RECORD.name}: run `python -m tests.test_wire_versions`"
    now = plane.record
    if now == record:
        return None
    if plane.version <= record["version"]:
        kinds = changed(now["layout"], record["layout"])
        versions = changed(now.get("counts with", {}), record.get("counts with", {}))
        found = [f"messages of the {name} have changed ({', '.join(kinds)})"] if kinds else []
        found += [f"the {name} counts with {constant}, which has changed" for constant in versions]
        found = found or [f"the {name} has not changed"]
        return (
            f"{'; '.join(found)}, and its version is {plane.version} as recorded or older: count up "
            f"{plane.constant}, then run `python -m tests.test_wire_versions`. Processes of the old and the new "
            "version then refuse each other by name; docs/recipes.md says what else changes"
        )
    return f"the {name} has a new version, {plane.version}: run `python -m tests.test_wire_versions` to record it"


def changed(now: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    return sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))


@pytest.mark.parametrize("name", PLANES)
def test_a_message_that_changes_brings_a_new_version(name: str) -> None:
    found = complaint(name, PLANES[name], recorded().get(name))
    assert found is None, found


@pytest.mark.parametrize("name", PLANES)
def test_the_changelog_says_the_version_of_each_plane(name: str) -> None:
    """An entry of an older release may say an older version, so the first entry counts."""
    said = re.findall(rf"(\d+) for the {name}", " ".join(CHANGELOG.read_text().split()))
    assert said[:1] == [str(PLANES[name].version)], "update the version in CHANGELOG.md"


class Colour(Enum):
    RED = "red"


@dataclass
class Inner:
    size: int


@dataclass
class Message:
    inner: tuple[Inner, ...]
    colour: Colour | None
    counts: dict[str, int]


def test_a_layout_names_fields_in_order_and_what_they_hold() -> None:
    assert layout_of(Message) == {
        "Colour": ["'red'"],
        "Inner": ["size: int"],
        "Message": ["inner: tuple[Inner, ...]", "colour: Colour | None", "counts: dict[str, int]"],
    }


@pytest.mark.parametrize(
    ("version", "layout", "other", "said"),
    [
        (2, {"Inner": ["size: int"]}, 7, None),
        (
            2,
            {"Inner": ["size: str"]},
            7,
            "(Inner), and its version is 2 as recorded or older: count up X in x.py",
        ),
        (2, {"Inner": ["size: int"]}, 8, "the plane counts with Y, which has changed, and its version is 2"),
        (3, {"Inner": ["size: int"]}, 7, "the plane has not changed, and its version is 2"),
        (1, {"Inner": ["size: str"]}, 8, "has a new version, 2"),
        (1, {"Inner": ["size: int"]}, 7, "has a new version, 2"),
    ],
)
def test_what_is_to_be_done_is_said(version: int, layout: Layout, other: int, said: str | None) -> None:
    record = {"version": version, "counts with": {"Y": 7}, "layout": layout}
    found = complaint("plane", Plane("X in x.py", 2, (Inner,), {"Y": other}), record)
    assert found is None if said is None else said in (found or "")


def main() -> int:
    """Records every plane, unless one has changed under its old version."""
    record = recorded() if RECORD.exists() else {}
    for name, plane in PLANES.items():
        known = record.get(name)
        if known is not None and "count up" in (problem := complaint(name, plane, known) or ""):
            print(problem, file=sys.stderr)
            return 1
        record[name] = plane.record
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
