"""No two modules import each other, however long the way round: neither when they are loaded nor inside functions.

An import inside a function hides a circle from Python, not from a reader. So circles are looked for twice: among the
imports that run when a module is loaded, and among all imports, `TYPE_CHECKING` included.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import PACKAGES, ROOT, modules

ALLOWED: Mapping[tuple[str, ...], str] = {}
"""Circles through imports inside functions, as sorted module names, each with its reason."""


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in modules(*PACKAGES)}


def imports_of(node: ast.AST, *, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """What is imported, and whether only when a function runs or types are checked."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((alias.name, is_late) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    submodule = f"{module}.{alias.name}"
                    yield (submodule if submodule in MODULES else module), is_late
            case ast.expr():
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imports_of(child, is_late=True)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imports_of(child, is_late=True)
            case _:
                yield from imports_of(child, is_late=is_late)


@cache
def imports() -> dict[str, list[tuple[str, bool]]]:
    return {name: [*imports_of(ast.parse(file.read_text()))] for name, file in MODULES.items()}


def import_graph(*, with_late: bool) -> dict[str, set[str]]:
    return {
        name: {target for target, is_late in imported if with_late or not is_late} & set(MODULES) - {name}
        for name, imported in imports().items()
    }


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Each set of modules that reach one another, sorted. First removes modules that import no module of the
    graph, again and again."""
    left = {name: set(targets) for name, targets in graph.items()}
    while ends := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets & set(left) - ends for name, targets in left.items() if name not in ends}
    reached = {name: reachable(left, name) for name in left}
    return {
        tuple(sorted({name} | {other for other in reached[name] if name in reached[other]}))
        for name in left
        if name in reached[name]
    }


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead.extend(new)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"f"}, "f": {"d"}, "g": set()}
    assert circles(graph) == {("b", "c"), ("d", "e", "f")}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import baton.kv", [("baton.kv", False)]),
        ("from baton import kv", [("baton.kv", False)]),
        ("from baton.kv import WorkerRef", [("baton.kv", False)]),
        ("def f():\n    from baton.kv import WorkerRef", [("baton.kv", True)]),
        ("if TYPE_CHECKING:\n    import baton.kv", [("baton.kv", True)]),
        ("class A:\n    import baton.kv", [("baton.kv", False)]),
    ],
)
def test_imports_are_told_apart(source: str, found: list[tuple[str, bool]]) -> None:
    assert list(imports_of(ast.parse(source))) == found


def test_no_modules_import_one_another_when_they_are_loaded() -> None:
    assert circles(import_graph(with_late=False)) == set()


def test_no_modules_import_one_another_inside_functions() -> None:
    found = circles(import_graph(with_late=True))
    assert found - set(ALLOWED) == set(), "move what both need into a module below them, or list the reason"
    assert set(ALLOWED) - found == set(), "these are no circles any more"
