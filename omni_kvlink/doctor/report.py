"""`HealthReport`: the findings of an examination, as text and as a JSON document."""

from __future__ import annotations

import textwrap
from typing import Any, Literal

import msgspec

from omni_kvlink._version import __version__
from omni_kvlink.cli.terminal import width

_STATUS_COLUMNS, _NAME_COLUMNS = 7, 17


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fact: `name` says of what, `text` what it is; `cure` what helps if it is wrong."""

    area: str
    name: str
    status: Literal["ok", "note", "wrong"]
    text: str
    cure: str = ""

    def lines(self) -> list[str]:
        """The finding for people: a line, longer texts wrapped, and the cure below it."""
        head = f"  {self.status:<{_STATUS_COLUMNS}}{self.name:<{_NAME_COLUMNS}}"
        indent = " " * (2 + _STATUS_COLUMNS + _NAME_COLUMNS)
        parts = [(head, self.text), *([(f"{indent}cure: ", self.cure)] if self.cure else [])]
        return [
            line
            for start, text in parts
            for line in textwrap.wrap(
                text,
                width(),
                initial_indent=start,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]


class HealthReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All findings, in the order of their areas; `healthy` is whether none is wrong."""

    schema: Literal["kvlink-doctor/1"]
    omni_kvlink: str
    healthy: bool
    findings: list[Finding]

    @classmethod
    def of(cls, findings: list[Finding]) -> HealthReport:
        """Make the report of this release."""
        is_healthy = all(finding.status != "wrong" for finding in findings)
        return cls("kvlink-doctor/1", __version__, is_healthy, findings)

    def text(self) -> str:
        """The report for people: the findings below the names of their areas, and the verdict."""
        lines, area = list[str](), ""
        for finding in self.findings:
            if finding.area != area:
                area = finding.area
                lines.append(area)
            lines += finding.lines()
        wrong = sum(finding.status == "wrong" for finding in self.findings)
        return "\n".join([*lines, f"{wrong} wrong" if wrong else "healthy"])

    def to_json(self) -> str:
        """The report for programs: a document of `schema()`."""
        return msgspec.json.format(msgspec.json.encode(self).decode())

    @staticmethod
    def read(document: str | bytes) -> HealthReport:
        """Read a document; msgspec.ValidationError if it does not keep to the schema."""
        return msgspec.json.decode(document, type=HealthReport)


def schema() -> dict[str, Any]:
    """The JSON schema of a report's document (draft 2020-12)."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **msgspec.json.schema(HealthReport)}
