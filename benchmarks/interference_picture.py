"""A picture of one round of each side, as SVG: the gaps between the tokens of chats, over time."""

from collections.abc import Iterator, Mapping
from html import escape

from benchmarks.interference_load import Seen, Workload

WIDTH, LEFT, RIGHT, TOP = 860, 60, 12, 34
PANEL, SPACE = 84, 40
"""Heights of a panel, and of the room above it for its title."""
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #57606a }
.title { font-weight: 600; fill: #24292f }
.axis { stroke: #d0d7de }
.gap { stroke: #0969da; stroke-width: 1.4 }
.long { fill: #cf222e }
"""


def draw(
    rounds: Mapping[str, list[Seen]], measured: Mapping[str, Mapping[str, float]], workload: Workload
) -> str:
    """Draws a panel for each side, all with the same scale.

    A gap is a bar at the gap's end, and the bar's height is the gap's length. If several bars would cover
    each other, only the longest is drawn. Triangles mark the arrival of long prompts.
    """
    top_s = max(gap for seen in rounds.values() for each in _chats(seen) for gap in each.gaps_s)
    end_s = max(each.arrivals_s[-1] for seen in rounds.values() for each in seen)
    height = TOP + len(rounds) * (PANEL + SPACE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{LEFT}" y="20">Gaps between the tokens of {workload.num_chats} chats, in seconds. '
        f"<tspan fill='#cf222e'>▲</tspan> A prompt of {workload.long_prompt:,} tokens arrives</text>",
    ]
    for number, (name, seen) in enumerate(rounds.items()):
        bottom = TOP + (number + 1) * (PANEL + SPACE) - 18
        lines += _panel(name, seen, measured[name], bottom, top_s, end_s)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    name: str, seen: list[Seen], figures: Mapping[str, float], bottom: int, top_s: float, end_s: float
) -> Iterator[str]:
    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s

    title = (
        f"{name}: gap p99 {figures['gap_p99_ms']:,.0f} ms, time to first token p99 "
        f"{figures['chat_ttft_p99_ms']:,.0f} ms, {figures['tokens_per_s']:.0f} tokens/s"
    )
    yield f'<text class="title" x="{LEFT}" y="{bottom - PANEL - 6}">{escape(title)}</text>'
    for height, label in ((PANEL, f"{top_s:.1f} s"), (0, "0")):
        yield f'<path class="axis" d="M{LEFT} {bottom - height}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{bottom - height + 4}" text-anchor="end">{label}</text>'
    longest: dict[int, float] = {}
    for each in _chats(seen):
        for at_s, gap_s in zip(each.arrivals_s[1:], each.gaps_s, strict=True):
            column = round(x(at_s))
            longest[column] = max(gap_s, longest.get(column, 0.0))
    bars = "".join(
        f"M{column} {bottom}v{-PANEL * gap_s / top_s:.1f}" for column, gap_s in sorted(longest.items())
    )
    yield f'<path class="gap" d="{bars}"/>'
    for each in seen:
        if not each.is_chat:
            yield f'<path class="long" d="M{x(each.sent_s):.1f} {bottom + 2}l4 8h-8z"/>'


def _chats(seen: list[Seen]) -> list[Seen]:
    return [each for each in seen if each.is_chat]
