"""The shapes of a step chart in SVG and their colours; knows no chart.

Colours are the colour-blind safe ones of Okabe and Ito, and shapes differ too, so nothing is lost in black and white.
Everything is styled by class, for light and dark pages.
"""

from collections.abc import Callable
from xml.etree.ElementTree import Element, SubElement

HEIGHT = 22.0
"""Height of every piece."""
ICON = 18.0
"""Width of a cross or an arrow."""
TIMES = "\N{MULTIPLICATION SIGN}"

Shape = Callable[[Element, float, float], None]
"""Draws itself into an element, given its left edge and its middle line."""

COLOURS = {
    "light": {
        "page": "#ffffff",
        "ink": "#1f2328",
        "muted": "#59636e",
        "grid": "#e3e7eb",
        "prompt": "#0072b2",
        "on-prompt": "#ffffff",
        "output": "#fbe0ae",
        "output-line": "#a86200",
        "on-output": "#3a2400",
        "load": "#a34a7c",
        "queue": "#8c959f",
        "alarm": "#c0390b",
        "blocks": "#c3cad1",
    },
    "dark": {
        "page": "#0d1117",
        "ink": "#e6edf3",
        "muted": "#9198a1",
        "grid": "#262c36",
        "prompt": "#1f78c1",
        "on-prompt": "#ffffff",
        "output": "#4a3500",
        "output-line": "#e69f00",
        "on-output": "#ffdf9e",
        "load": "#dd8ab6",
        "queue": "#7d8590",
        "alarm": "#ff8a65",
        "blocks": "#3d4752",
    },
}
"""By the kind of page."""

_SHAPES = """\
.baton-steps text { font: 12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
.baton-steps .middle { text-anchor: middle; }
.baton-steps .right { text-anchor: end; }
.baton-steps .name { font-size: 15px; font-weight: 600; }
.baton-steps .label { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.baton-steps .small { font-size: 10.5px; }
.baton-steps .strong { font-weight: 600; }
.baton-steps .struck { text-decoration: line-through; }
.baton-steps .waiting, .baton-steps .loading { fill: none; stroke-linecap: round; }
.baton-steps .waiting { stroke-width: 2; stroke-dasharray: 0.1 6; }
.baton-steps .loading { stroke-width: 1.5; stroke-dasharray: 3 4; }
.baton-steps .icon { fill: none; stroke-width: 2.2; stroke-linecap: round; stroke-linejoin: round; }
.baton-steps .in-vain { fill: none; stroke-dasharray: 3 3; }
.baton-steps .limit { stroke-width: 1; stroke-dasharray: 4 3; }
.baton-steps .haloed { paint-order: stroke; stroke-width: 4; stroke-linejoin: round; }
"""

_COLOURED = """\
.baton-steps .page {{ fill: {page}; }}
.baton-steps text {{ fill: {ink}; }}
.baton-steps .muted {{ fill: {muted}; }}
.baton-steps .grid {{ stroke: {grid}; }}
.baton-steps .limit {{ stroke: {muted}; }}
.baton-steps .prefill {{ fill: {prompt}; }}
.baton-steps .on-prefill {{ fill: {on-prompt}; }}
.baton-steps .decode, .baton-steps .in-vain {{ stroke: {output-line}; }}
.baton-steps .decode {{ fill: {output}; }}
.baton-steps .output-bar {{ fill: {output-line}; }}
.baton-steps .on-decode {{ fill: {on-output}; }}
.baton-steps .lead {{ stroke: {prompt}; }}
.baton-steps .hatch {{ stroke: {prompt}; }}
.baton-steps .haloed {{ stroke: {page}; }}
.baton-steps .waiting {{ stroke: {queue}; }}
.baton-steps .loading, .baton-steps .resumed {{ stroke: {load}; }}
.baton-steps .on-loading {{ fill: {load}; }}
.baton-steps .preempted {{ stroke: {alarm}; }}
.baton-steps .end {{ fill: {ink}; }}
.baton-steps .end-icon {{ stroke: {ink}; }}
.baton-steps .blocks {{ fill: {blocks}; }}
"""

STYLE = (
    _SHAPES
    + _COLOURED.format_map(COLOURS["light"])
    + f"@media (prefers-color-scheme: dark) {{\n{_COLOURED.format_map(COLOURS['dark'])}}}\n"
)


def add(parent: Element, tag: str, text: str = "", /, **attributes: str | float) -> Element:
    """Adds a child; `class_` is spelled so because `class` is a keyword, and `_` within a name stands for `-`."""
    values = {
        name.rstrip("_").replace("_", "-"): value
        if isinstance(value, str)
        else f"{value:.2f}".rstrip("0").rstrip(".")
        for name, value in attributes.items()
    }
    child = SubElement(parent, tag, values)
    child.text = text or None
    child.tail = None if tag in ("tspan", "title") else "\n"  # where white space means nothing
    return child


def add_definitions(root: Element) -> None:
    """Style and patterns, once per document."""
    add(root, "style", "\n" + STYLE)
    definitions = add(root, "defs")
    for name, turn in (("cached", 45), ("swapped-in", -45)):
        pattern = add(
            definitions,
            "pattern",
            id=f"baton-{name}",
            width=5,
            height=5,
            patternUnits="userSpaceOnUse",
            patternTransform=f"rotate({turn})",
        )
        add(pattern, "line", x1=0, y1=0, x2=0, y2=5, stroke_width=2.4, class_="hatch")
        if name == "swapped-in":
            add(pattern, "line", x1=0, y1=0, x2=5, y2=0, stroke_width=1.2, class_="hatch")


def write(parent: Element, x: float, y: float, text: str, class_: str = "") -> Element:
    """Text whose middle line is at `y`."""
    return add(parent, "text", text, x=x, y=y + 4, class_=class_)


def prefill(parent: Element, x: float, y: float, width: float, text: str, num_steps: int = 1) -> None:
    """A solid block around the middle line `y`, with others behind it if it stands for several steps."""
    _stack(parent, x, y, width, 2.5, "prefill", num_steps)
    _count(parent, x + width / 2, y, text, "on-prefill", num_steps)


def decode(parent: Element, x: float, y: float, width: float, text: str, num_steps: int = 1) -> None:
    """A pill."""
    _stack(parent, x, y, width, HEIGHT / 2, "decode", num_steps)
    _count(parent, x + width / 2, y, text, "on-decode", num_steps)


def in_vain(parent: Element, x: float, y: float, width: float, text: str) -> None:
    """An empty pill whose token is struck out."""
    add(parent, "rect", x=x, y=y - HEIGHT / 2, width=width, height=HEIGHT, rx=HEIGHT / 2, class_="in-vain")
    write(parent, x + width / 2, y, text, "muted middle struck")


def lead(parent: Element, x: float, y: float, width: float, text: str, pattern: str) -> None:
    """A hatched box for tokens that need not be computed."""
    box = add(parent, "rect", x=x, y=y - HEIGHT / 2, width=width, height=HEIGHT, rx=2.5, class_="lead")
    box.set("fill", f"url(#baton-{pattern})")
    write(parent, x + width / 2, y, text, "middle strong haloed")


def waiting(parent: Element, x: float, y: float, width: float) -> None:
    """A dotted line."""
    add(parent, "line", x1=x + 4, y1=y, x2=x + width - 4, y2=y, class_="waiting")


def loading(parent: Element, x: float, y: float, width: float, words: str) -> None:
    """A dashed outline, with words if they fit."""
    add(parent, "rect", x=x, y=y - 8, width=width, height=16, rx=8, class_="loading")
    if width >= 6 * len(words) + 12:
        write(parent, x + width / 2, y, words, "on-loading middle small haloed")


def cross(parent: Element, x: float, y: float) -> None:
    add(parent, "path", d=f"M{x + 4:g} {y - 5:g}l10 10m0 -10l-10 10", class_="icon preempted")


def turn(parent: Element, x: float, y: float) -> None:
    """An arrow that turns back."""
    add(
        parent,
        "path",
        d=f"M{x + 13.6:g} {y + 2:g}a5.5 5.5 0 1 1 -1.2 -5.4m.6 -3.6v4h-4",
        class_="icon resumed",
    )


def end(parent: Element, x: float, y: float, words: str, is_handed_over: bool) -> None:
    """A full stop, or an arrow if the request was handed over, and the reason."""
    if is_handed_over:
        add(parent, "path", d=f"M{x + 4:g} {y:g}h11m-4 -4l4 4l-4 4", class_="icon end-icon")
    else:
        add(parent, "rect", x=x + 5, y=y - 4, width=8, height=8, class_="end")
    write(parent, x + ICON + 3, y, words, "haloed")


def _stack(parent: Element, x: float, y: float, width: float, rx: float, class_: str, num_steps: int) -> None:
    top = y - HEIGHT / 2
    if num_steps > 1:
        add(
            parent,
            "rect",
            x=x + 3,
            y=top - 3,
            width=width - 3,
            height=HEIGHT,
            rx=rx,
            class_=class_,
            opacity=0.45,
        )
        width -= 3
    add(parent, "rect", x=x, y=top, width=width, height=HEIGHT, rx=rx, class_=class_)


def _count(parent: Element, x: float, y: float, text: str, class_: str, num_steps: int) -> None:
    if num_steps > 1:
        x -= 1.5
    label = write(parent, x, y, text, f"middle strong {class_}")
    if num_steps > 1:
        add(label, "tspan", f" {TIMES}{num_steps}", class_=class_, font_weight="400")
