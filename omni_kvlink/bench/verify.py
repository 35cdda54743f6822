"""Whether every payload arrives bit for bit, by digests that the library has no part in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.cases import Case, cases
from omni_kvlink.bench.pair import Pair, open_setup
from omni_kvlink.bench.report import filled
from omni_kvlink.cli.terminal import Progress, progress, table
from omni_kvlink.errors import KVLinkError
from omni_kvlink.testing.peer_harness import PeerError
from omni_kvlink.testing.tampering import TamperingCopier, do_nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.bench.setups import VerifySetup
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest


MAX_SHOWN = 10


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
    drawn: tuple[dict[str, float], str] = ({}, "")

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
        failed = [
            {"case": str(outcome.case), "problem": outcome.problem} for outcome in self.failed
        ]
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
        failed = [filled(f"FAILED {o.case}: {o.problem}") for o in self.failed[:MAX_SHOWN]]
        if len(self.failed) > MAX_SHOWN:
            failed.append(f"... and {len(self.failed) - MAX_SHOWN} more")
        count = len(self.outcomes)
        verdict = f"{len(self.failed)} of {count} cases FAILED" if failed else f"all {count} passed"
        summary = f"{verdict}, {self.nbytes / 1e6:.1f} MB sent, SHA-256 of each tensor at both ends"
        return "\n\n".join([table(["cases", *rows], lines), *failed, filled(summary)])


def measure(
    setup: VerifySetup, progress: Progress = progress, chosen: Sequence[Case] = ()
) -> Verdict:
    """Send each case, all if none is chosen, and compare; an error of a transfer fails its case."""
    outcomes, chosen = [], chosen or list(cases(quick=setup.quick))
    tampering = TamperingCopier()
    copier = setup.copier if setup.corrupt < 0 else tampering
    with (
        open_setup(setup, copier=copier) as pair,
        progress("cases", len(chosen)) as step,
    ):
        for case in chosen:
            tampering.tamper = _flip_last if case.number == setup.corrupt else do_nothing
            outcomes.append(_send(pair, case))
            step()
    return Verdict(outcomes)


def _flip_last(manifest: Manifest, region: Region) -> None:
    """Flip a bit in the middle of the last tensor with bytes."""
    spec = next(spec for spec in reversed(manifest.tensors) if spec.nbytes)
    region.view()[manifest.header_nbytes + (spec.start + spec.stop) // 2] ^= 1


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
        received = inspecting.result(60.0)
        receipt.wait(timeout=30.0)
    except (KVLinkError, PeerError) as error:
        pair.link.fail(key, "the reader failed")
        return Outcome(case, receipt.ledger.nbytes, str(error))
    return Outcome(case, receipt.ledger.nbytes, _difference(expected, received))


def _difference(expected: dict[str, Any], received: dict[str, Any]) -> str:
    """The first difference, in words; empty if there is none."""
    if list(expected) != list(received):
        return f"branches {list(received)}, wanted {list(expected)}"
    for branch, fields in expected.items():
        prefix = f"branch {branch!r}, " if branch else ""
        for name, right in fields.items():
            got = received[branch][name]
            if name == "digests":
                wrong = [i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b]
                if wrong or len(right) != len(got):
                    return f"{prefix}tensors {wrong} of {len(right)} are not those that were put"
            elif got != right:
                return f"{prefix}{name}: {got!r}, wanted {right!r}"
    return ""


def _cell(total: int, bad: int) -> str:
    if not total:
        return "-"
    return f"{bad}/{total} FAILED" if bad else f"{total} ok"
