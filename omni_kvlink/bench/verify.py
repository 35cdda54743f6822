"""Whether what arrives is bit for bit what was put, by digests the library has no part in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from omni_kvlink.bench.bitflip import BitflipCopier
from omni_kvlink.bench.cases import Case
from omni_kvlink.bench.errors import ReaderError
from omni_kvlink.bench.pair import Pair, open_pair
from omni_kvlink.bench.report import table
from omni_kvlink.errors import ConnectorError, KVLinkError

MAX_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one case; `problem` is "" where all was equal."""

    case: Case
    nbytes: int
    problem: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All cases of one run."""

    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problem]

    @property
    def nbytes(self) -> int:
        """Bytes of payloads that were sent."""
        return sum(outcome.nbytes for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cases": len(self.outcomes),
            "passed": len(self.outcomes) - len(self.failed),
            "failed": [
                {"case": str(outcome.case), "problem": outcome.problem} for outcome in self.failed
            ],
            "bytes": self.nbytes,
        }

    def text(self) -> str:
        """A table of passes by dtype and shape, then what failed."""
        rows = list(dict.fromkeys(outcome.case.rows for outcome in self.outcomes))
        dtypes = list(dict.fromkeys(outcome.case.shape.dtype for outcome in self.outcomes))
        total, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for outcome in self.outcomes:
            place = (outcome.case.shape.dtype, outcome.case.rows)
            total[place] += 1
            bad[place] += bool(outcome.problem)
        lines = [
            [dtype, *(_cell(total[dtype, r], bad[dtype, r]) for r in rows)] for dtype in dtypes
        ]
        failed = [f"FAILED {o.case}: {o.problem}" for o in self.failed[:MAX_SHOWN]]
        if len(self.failed) > MAX_SHOWN:
            failed.append(f"... and {len(self.failed) - MAX_SHOWN} more")
        count = len(self.outcomes)
        verdict = f"{len(self.failed)} of {count} cases FAILED" if failed else f"all {count} passed"
        summary = f"{verdict}, {self.nbytes / 1e6:.1f} MB sent, SHA-256 of each tensor at both ends"
        return "\n\n".join([table(["cases", *rows], lines), *failed, summary])


def run(
    connector: str,
    chosen: Sequence[Case],
    step: Callable[[], None] = lambda: None,
    *,
    url: str = "",
    copier: str = "auto",
    mode: str = "pooled",
    corrupt: int = -1,
) -> Verdict:
    """Send each case and compare; an error of the transfer fails its case.

    Args:
        corrupt: the number of a case to spoil in flight, so that failing can be seen.
    """
    outcomes = []
    with open_pair(connector, url=url, copier=copier, mode=mode) as pair:
        spoiler = BitflipCopier(pair.link._copier)
        if corrupt >= 0:
            pair.link._copier = spoiler
        for case in chosen:
            spoiler.armed = case.number == corrupt
            outcomes.append(_send(pair, case))
            step()
    return Verdict(outcomes)


def _send(pair: Pair, case: Case) -> Outcome:
    key, payload, expected = case.make()
    pair.peer.tell(do="inspect", key=key, timeout=30.0)
    try:
        receipt = pair.link.put(payload)
    except KVLinkError as error:
        pair.link.fail(key, "the put failed")
        with contextlib.suppress(ReaderError):
            pair.peer.answer(timeout=60.0)
        return Outcome(case, 0, f"put: {error}")
    try:
        found = pair.peer.answer(timeout=60.0)["branches"]
        receipt.wait(timeout=30.0)
    except (ReaderError, ConnectorError) as error:
        pair.link.fail(key, "the reader failed")
        return Outcome(case, receipt.ledger.nbytes, str(error))
    return Outcome(case, receipt.ledger.nbytes, _difference(expected, found))


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first thing that differs, in words."""
    if list(expected) != list(found):
        return f"branches {list(found)}, wanted {list(expected)}"
    for branch, facts in expected.items():
        where = f"branch {branch!r}, " if branch else ""
        for name, want in facts.items():
            got = found[branch][name]
            if name == "digests":
                wrong = [
                    i for i, pair in enumerate(zip(want, got, strict=False)) if len({*pair}) > 1
                ]
                if wrong or len(want) != len(got):
                    return f"{where}tensors {wrong} of {len(want)} are not those that were put"
            elif got != want:
                return f"{where}{name}: {got!r}, wanted {want!r}"
    return ""


def _cell(total: int, bad: int) -> str:
    if not total:
        return "-"
    return f"{bad}/{total} FAILED" if bad else f"{total} ok"
