"""The result of a command: its report, its JSON values, and the bars that it must meet."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.bench.report import bar, bar_line, wrapped
from omni_kvlink.bench.stats import Summary

if TYPE_CHECKING:
    from collections.abc import Iterable

Lines: TypeAlias = "list[tuple[str, str]]"
"""Lines of a report, each with its label."""
Bars: TypeAlias = "Iterable[tuple[str, float, float]]"
"""Names, figures and their limits, see `report.bar`."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The findings of a command.

    Attributes:
        figures: the document's values, whose keys are stable; a `Summary` stands for its fields.
        head: what was measured.
        tables: the figures of all measurements.
        lines: what follows from the tables.
        bars: none for a setup without one; see `Bars`.
        drawn: the values of a chart, and their unit.
        failed: how many payloads were wrong.
    """

    figures: dict[str, Any]
    head: Lines
    tables: str
    lines: Lines
    bars: Bars = ()
    drawn: tuple[dict[str, float], str] = ({}, "")
    failed: int = 0

    def __post_init__(self) -> None:
        self.figures["bars"] = [bar(*figure) for figure in self.bars]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        values: dict[str, Any] = _as_json(self.figures)
        return values

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        head, lines = (
            "\n".join(wrapped(*line) for line in part) for part in (self.head, self.lines)
        )
        bars = [bar_line(figure) for figure in self.figures["bars"]]
        return "\n\n".join((head, self.tables, "\n".join((lines, *bars))))


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    return value.to_dict() if isinstance(value, Summary) else value
