"""A picture of what ran when, as SVG: a row for each actor, a bar for each span of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LEFT, WIDTH, HEIGHT = 150, 820, 22
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
COLORS = ("#818cf8", "#fdba74", "#86efac", "#d1d5db")


class Span(NamedTuple):
    """What ran, and when it began and ended."""

    kind: str
    begin: float
    end: float


class Row(NamedTuple):
    """The spans of one actor."""

    label: str
    spans: Sequence[Span]


def timeline(unit: str, rows: Sequence[Row]) -> str:
    """Draw the rows from top to bottom, over an axis from 0, with a color for each kind."""
    kinds = list(dict.fromkeys(span.kind for row in rows for span in row.spans))
    last = max(span.end for row in rows for span in row.spans)
    scale, bottom = (WIDTH - LEFT - 40) / last, 44 + HEIGHT * len(rows)
    parts = [_legend(kinds), _text(WIDTH - 34, bottom + 16, unit)]
    for tick in _ticks(last):
        x = LEFT + tick * scale
        parts.append(f"<line x1='{x:.1f}' y1='38' x2='{x:.1f}' y2='{bottom}' stroke='{GRID}'/>")
        parts.append(_text(x, bottom + 16, f"{tick:g}"))
    for number, row in enumerate(rows):
        y = 44 + HEIGHT * number
        parts.append(_text(20, y + 12, row.label, INK))
        parts += [
            _bar(LEFT + begin * scale, y, (end - begin) * scale, kinds.index(kind))
            for kind, begin, end in row.spans
        ]
    height = bottom + 28
    ground = f"<rect width='{WIDTH}' height='{height}' rx='12' fill='white'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>"
    return "\n".join((opening, ground, *parts, "</svg>\n"))


def _legend(kinds: Sequence[str]) -> str:
    items = zip(kinds, range(LEFT, WIDTH, 110), range(len(COLORS)), strict=False)
    return "\n".join(_bar(x, 14, 14, n) + _text(x + 20, 26, kind, INK) for kind, x, n in items)


def _bar(x: float, y: float, width: float, color: int) -> str:
    return f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='14' fill='{COLORS[color]}'/>"


def _text(x: float, y: float, content: str, color: str = MUTED) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-family='system-ui, sans-serif' font-size='12' "
        f"fill='{color}'>{content}</text>"
    )


def _ticks(last: float) -> list[float]:
    """Eight or fewer round numbers from 0."""
    steps = (digit * 10.0**power for power in range(-2, 9) for digit in (1, 2, 5))
    step = next(step for step in steps if last / step < 8)
    return [step * number for number in range(int(last / step) + 1)]
