"""Whether every payload arrives bit for bit, by digests that the library has no part in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.bitflip import BitflipCopier
from omni_kvlink.bench.cases import Case, cases
from omni_kvlink.bench.pair import Pair, open_pair
from omni_kvlink.bench.report import table
from omni_kvlink.copier import named_copier
from omni_kvlink.errors import KVLinkError
from omni_kvlink.testing.peer_harness import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MAX_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class VerifySetup:
    """What to send, and how; a bit of the case of the number `corrupt` is flipped on the way."""

    connector: str
    url: str = ""
    mode: str = "pooled"
    copier: str = "auto"
    quick: bool = False
    corrupt: int = -1

    @property
    def steps(self) -> int:
        """How often `measure` calls `step`."""
        return sum(1 for _ in cases(quick=self.quick))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one case; `problem` is empty if all was equal."""

    case: Case
    nbytes: int
    problem: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All cases of one run."""

    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The cases that did not arrive, or not equal."""
        return [outcome for outcome in self.outcomes if outcome.problem]

    @property
    def nbytes(self) -> int:
        """Bytes of payloads that were sent."""
        return sum(outcome.nbytes for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        failed = [{"case": str(one.case), "problem": one.problem} for one in self.failed]
        count = len(self.outcomes)
        passed = count - len(failed)
        return {"cases": count, "passed": passed, "failed": failed, "bytes": self.nbytes}

    def text(self) -> str:
        """A table of passes by dtype and shape, then what failed."""
        total, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for outcome in self.outcomes:
            cell = (outcome.case.shape.dtype, outcome.case.rows)
            total[cell] += 1
            bad[cell] += bool(outcome.problem)
        dtypes, rows = (list(dict.fromkeys(names)) for names in zip(*total, strict=True))
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


def measure(
    setup: VerifySetup, step: Callable[[], None] = lambda: None, chosen: Sequence[Case] = ()
) -> Verdict:
    """Send each case, all of them if none is chosen, and compare; `step` is called after each.

    An error of a transfer fails its case.
    """
    outcomes = []
    bitflip = BitflipCopier(named_copier(setup.copier))
    copier = setup.copier if setup.corrupt < 0 else bitflip
    with open_pair(setup.connector, url=setup.url, copier=copier, mode=setup.mode) as pair:
        for case in chosen or cases(quick=setup.quick):
            bitflip.armed = case.number == setup.corrupt
            outcomes.append(_send(pair, case))
            step()
    return Verdict(outcomes)


def _send(pair: Pair, case: Case) -> Outcome:
    key, payload, expected = case.make()
    inspecting = pair.peer.submit("inspect", key=key, timeout=30.0)
    try:
        receipt = pair.link.put(payload)
    except KVLinkError as error:
        pair.link.fail(key, "the put failed")
        with contextlib.suppress(KVLinkError, PeerError):
            inspecting.result(60.0)
        return Outcome(case, 0, f"put: {error}")
    try:
        found = inspecting.result(60.0)
        receipt.wait(timeout=30.0)
    except (KVLinkError, PeerError) as error:
        pair.link.fail(key, "the reader failed")
        return Outcome(case, receipt.ledger.nbytes, str(error))
    return Outcome(case, receipt.ledger.nbytes, _difference(expected, found))


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first difference, in words; empty if there is none."""
    if list(expected) != list(found):
        return f"branches {list(found)}, wanted {list(expected)}"
    for branch, fields in expected.items():
        where = f"branch {branch!r}, " if branch else ""
        for name, right in fields.items():
            got = found[branch][name]
            if name == "digests":
                wrong = [i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b]
                if wrong or len(right) != len(got):
                    return f"{where}tensors {wrong} of {len(right)} are not those that were put"
            elif got != right:
                return f"{where}{name}: {got!r}, wanted {right!r}"
    return ""


def _cell(total: int, bad: int) -> str:
    if not total:
        return "-"
    return f"{bad}/{total} FAILED" if bad else f"{total} ok"
