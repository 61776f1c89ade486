"""Step charts as SVG: well-formed, everything in its place, and readable on any page by anybody."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from baton.request import FinishReason
from cli.trace_chart.shapes import COLOURS, STYLE
from cli.trace_chart.steps import Chart, make_chart
from cli.trace_chart.svg import svg_of
from tests.factories.traces import CHUNKED, HANDED_OVER, PREEMPTED, make_header, make_step, make_trace
from worker.step_trace import Trace

NAMESPACE = {"": "http://www.w3.org/2000/svg"}


@dataclass(frozen=True)
class DrawnPiece:
    """One piece as it stands in the document; its box is that of its first rectangle or line, and of all others."""

    kind: str
    left: float
    right: float
    texts: tuple[str, ...]
    title: str


def parse(*traces: Trace, fold_above: int = 40) -> ET.Element:
    return ET.fromstring(svg_of(make_chart(traces, fold_above=fold_above)))


def all_of(parent: ET.Element, name: str) -> list[ET.Element]:
    """Groups of a class."""
    groups = parent.iterfind(".//g", NAMESPACE)
    return [group for group in groups if name in group.get("class", "").split()]


def texts_of(parent: ET.Element) -> list[str]:
    return ["".join(text.itertext()) for text in parent.iterfind(".//text", NAMESPACE)]


def rows_of(panel: ET.Element) -> dict[str, list[DrawnPiece]]:
    """Pieces by the label of their row."""
    rows = all_of(panel, "request")
    return {str(row[0].text): [drawn(piece) for piece in all_of(row, "piece")] for row in rows}


def drawn(piece: ET.Element) -> DrawnPiece:
    edges: list[float] = []
    for rect in piece.iterfind("rect", NAMESPACE):
        edges += [float(rect.attrib["x"]), float(rect.attrib["x"]) + float(rect.attrib["width"])]
    for line in piece.iterfind("line", NAMESPACE):
        edges += [float(line.attrib["x1"]), float(line.attrib["x2"])]
    title = piece.findtext("title", "", NAMESPACE)
    kind = piece.attrib["class"].removeprefix("piece ")
    return DrawnPiece(kind, min(edges), max(edges), tuple(texts_of(piece)), title)


def short(pieces: list[DrawnPiece]) -> list[str]:
    return [" ".join([piece.kind.removesuffix("-piece"), *piece.texts]) for piece in pieces]


def test_every_step_of_every_request_is_a_piece_with_its_tokens() -> None:
    (panel,) = all_of(parse(CHUNKED), "panel")
    assert {label: short(pieces) for label, pieces in rows_of(panel).items()} == {
        "one": ["prefill 60", "decode 1", "decode 1"],
        "two": ["prefill 40", "prefill 30", "decode 1", "decode 1"],
        "three": ["waiting", "prefill 9", "decode 1", "decode 1"],
    }
    assert [texts_of(ending) for ending in all_of(panel, "ending")] == [["stop"], ["length"], ["aborted"]]


def test_pieces_of_one_step_stand_below_one_another() -> None:
    (panel,) = all_of(parse(CHUNKED), "panel")
    one, two, three = rows_of(panel).values()
    for step in range(3):
        assert one[step].left == two[step].left
        assert one[step].right == two[step].right
    assert [piece.left for piece in three[1:]] == [piece.left for piece in two[1:]]
    assert all(before.right < after.left for before, after in pairwise(two))


def test_what_was_computed_before_is_hatched_and_marks_have_room() -> None:
    root = parse(PREEMPTED, fold_above=12)
    (panel,) = all_of(root, "panel")
    rows = rows_of(panel)
    times = "\N{MULTIPLICATION SIGN}"
    assert short(rows["old"])[3] == f"decode 1 {times}10"
    assert short(rows["young"])[3:] == ["decode 31 1", "decode 1", "waiting", "prefill 16 17"]
    assert short(rows["new"])[0] == "prefill 32 3"
    patterns = [rect.attrib["fill"] for rect in root.iterfind(".//rect[@fill]", NAMESPACE)]
    assert patterns.count("url(#baton-cached)") == 2 + 1, "two pieces and the legend"
    assert patterns.count("url(#baton-swapped-in)") == 1 + 1
    ids = {pattern.attrib["id"] for pattern in root.iterfind(".//pattern", NAMESPACE)}
    assert ids == {"baton-cached", "baton-swapped-in"}
    crosses = [group[1].attrib["d"] for group in all_of(panel, "preemption")]
    assert len(crosses) == 2
    waiting = [piece for piece in rows["young"] if piece.kind == "waiting-piece"]
    for cross, piece in zip(crosses, waiting, strict=True):
        begin = float(cross.removeprefix("M").split()[0])
        assert begin + 10 < piece.left, "the dots begin behind the cross"


def test_a_long_step_stretches_over_what_the_other_worker_did_meanwhile() -> None:
    prefill, decode = all_of(parse(*HANDED_OVER, fold_above=8), "panel")
    (chunk, rest), (loading, *_) = rows_of(prefill)["aaaa"], rows_of(decode)["aaaa"]
    prompt, first_run, second_run, *_ = rows_of(decode)["bbbb"]
    assert chunk.left < prompt.left < first_run.left < chunk.right
    assert first_run.right > rest.left, "its last step was not done when the second chunk began"
    assert rest.left < second_run.left < rest.right
    assert loading.left == prompt.left
    assert loading.right > second_run.right - 5
    assert loading.texts == ("waits for KV",)
    assert [texts_of(ending) for ending in all_of(prefill, "ending")] == [["handed over"]]


def test_whoever_points_at_a_piece_is_told_all_about_it() -> None:
    (panel,) = all_of(parse(CHUNKED), "panel")
    assert rows_of(panel)["two"][1].title == "two in step 2; 30 computed, 40 before; its prompt has 70"


def test_bars_say_how_full_a_step_was() -> None:
    (tokens,) = all_of(parse(CHUNKED), "tokens")
    bars = [(bar.attrib["class"], float(bar.attrib["height"])) for bar in tokens.iterfind("rect", NAMESPACE)]
    full = bars[0][1]
    assert bars[:3] == [
        ("prefill", full),
        ("prefill", pytest.approx(0.39 * full, abs=0.1)),
        ("output-bar", 2.0),
    ]
    assert texts_of(tokens)[2:] == ["100", "40", "3", "2", "0"]
    (free,) = all_of(parse(CHUNKED), "free-blocks")
    heights = [float(bar.attrib["height"]) for bar in free.iterfind("rect", NAMESPACE)]
    assert heights == pytest.approx(
        [num_free / 40 * heights[0] for num_free in (40, 40, 38, 40, 50)], abs=0.1
    )


def test_counts_have_a_line_only_where_something_happened() -> None:
    assert [all_of(parse(CHUNKED), name) == [] for name in ("in-the-queue", "swapped-out")] == [False, True]
    assert texts_of(all_of(parse(PREEMPTED), "swapped-out")[0]) == ["swapped out", "2"]


@pytest.mark.parametrize(
    "traces", [(CHUNKED,), (PREEMPTED,), HANDED_OVER], ids=["chunked", "preempted", "handed over"]
)
@pytest.mark.parametrize("fold_above", [1, 40])
def test_nothing_leaves_the_page_and_no_pieces_overlap(traces: tuple[Trace, ...], fold_above: int) -> None:
    root = parse(*traces, fold_above=fold_above)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
    for element in root.iter():
        x = float(element.get("x", element.get("x1", "0")))
        y = float(element.get("y", element.get("y1", "0")))
        assert 0 <= x + float(element.get("width", "0") if element.tag.endswith("rect") else 0) <= width
        assert 0 <= y <= height
    for text in root.iterfind(".//text", NAMESPACE):
        if "right" not in text.get("class", "").split():
            assert float(text.attrib["x"]) + len("".join(text.itertext())) * 4 <= width
    for panel in all_of(root, "panel"):
        for pieces in rows_of(panel).values():
            assert all(before.right <= after.left for before, after in pairwise(pieces))


def test_the_legend_explains_what_occurs_and_nothing_else() -> None:
    (legend,) = all_of(parse(CHUNKED), "legend")
    assert [text for text in texts_of(legend) if len(text) > 1] == [
        "prompt tokens",
        "output token",
        "in the queue",
    ]


def test_what_was_left_out_is_said() -> None:
    root = ET.fromstring(svg_of(make_chart([CHUNKED], max_columns=2)))
    assert texts_of(root)[-1] == "3 later steps are left out"


def test_names_from_outside_cannot_break_the_document() -> None:
    evil = '<script>alert("1")</script>&\x00\x1b'
    step = make_step(1, {evil: (3, 0)}, preempted=(evil,), ended={evil: FinishReason.ERROR})
    trace = replace(make_trace([step]), header=make_header(evil))
    root = ET.fromstring(svg_of(make_chart([trace])))
    assert root.findall(".//script", NAMESPACE) == []
    assert any("<script>" in text for text in texts_of(root))


def test_an_empty_chart_is_a_document_too() -> None:
    assert ET.fromstring(svg_of(Chart((), 0, ()))).tag.endswith("svg")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", COLOURS)
def test_everything_can_be_read_on_light_and_dark_pages(page: str) -> None:
    colours = COLOURS[page]
    for text, ground in (
        ("ink", "page"),
        ("muted", "page"),
        ("on-prompt", "prompt"),
        ("on-output", "output"),
        ("load", "page"),
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, f"{text} on {ground}"
    for shape in ("prompt", "output-line", "queue", "alarm"):
        assert contrast(colours[shape], colours["page"]) >= 3, shape
    assert contrast(colours["prompt"], colours["output"]) >= 2, "apart without colours"


def test_a_dark_page_changes_every_colour_that_a_light_one_sets() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    selectors = r"^(\.baton-steps [^{]*) \{ (?:fill|stroke): #"
    assert re.findall(selectors, dark, re.MULTILINE) == re.findall(selectors, light, re.MULTILINE)
