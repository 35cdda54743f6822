"""A bar chart of measurements, as an SVG file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
OURS, OTHER = "#a5b4fc", "#d1d5db"
FONT = "font-family='system-ui, sans-serif'"
LEFT, WIDTH, ROW = 300, 820, 30


class BarRow(NamedTuple):
    """A bar from 0 to `p50`, and a line from `least` to `greatest`."""

    label: str
    p50: float
    least: float
    greatest: float
    color: str = OURS


def times(label: str, values: Mapping[str, float], color: str = OURS) -> BarRow:
    """A row of the p50, min and max of a `Summary`."""
    return BarRow(label, values["p50"], values["min"], values["max"], color)


def chart(title: str, unit: str, rows: Sequence[BarRow], *, mark: float = 0.0) -> str:
    """Draw horizontal bars with ranges; `mark` is a dashed line."""
    top = max(max(row.greatest for row in rows), mark) * 1.12
    scale, bottom = (WIDTH - LEFT - 30) / top, 56 + ROW * len(rows)
    parts = [_text(20, 26, title, "start", weight=600)]
    for tick in _ticks(top):
        x = LEFT + tick * scale
        parts.append(f"<line x1='{x:.1f}' y1='44' x2='{x:.1f}' y2='{bottom}' stroke='{GRID}'/>")
        parts.append(_text(x, bottom + 18, f"{tick:g}", "middle", MUTED))
    for number, row in enumerate(rows):
        y = 50 + ROW * number
        least, right, most_x = (LEFT + x * scale for x in (row.least, row.p50, row.greatest))
        parts += [
            _text(LEFT - 10, y + 14, row.label, "end"),
            f"<rect x='{LEFT}' y='{y}' width='{row.p50 * scale:.1f}' height='20' rx='3' "
            f"fill='{row.color}'/>",
            f"<line x1='{least:.1f}' y1='{y + 10}' x2='{most_x:.1f}' y2='{y + 10}' "
            f"stroke='{INK}' stroke-width='2'/>",
            _text(max(most_x, right) + 6, y + 14, f"{row.p50:.3g}", "start", MUTED),
        ]
    if mark:
        x = LEFT + mark * scale
        parts.append(
            f"<line x1='{x:.1f}' y1='44' x2='{x:.1f}' y2='{bottom}' stroke='{INK}' "
            "stroke-dasharray='5 4'/>"
        )
    parts.append(_text(WIDTH - 20, 26, unit, "end", MUTED))
    height = bottom + 30
    ground = f"<rect width='{WIDTH}' height='{height}' rx='12' fill='white'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>"
    return "\n".join((opening, ground, *parts, "</svg>\n"))


def _text(
    x: float, y: float, content: str, anchor: str, color: str = INK, weight: int = 400
) -> str:
    """One line."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='13' font-weight='{weight}' "
        f"fill='{color}' text-anchor='{anchor}'>{content}</text>"
    )


def _ticks(top: float) -> list[float]:
    """Five or fewer round numbers above 0."""
    step = next(
        step
        for power in (0.01, 0.1, 1, 10, 100, 1000)
        for step in (power, 2 * power, 5 * power)
        if top / step <= 5.5
    )
    return [step * n for n in range(1, int(top / step) + 1)]
