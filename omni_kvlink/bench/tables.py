"""A latency result for people."""

from __future__ import annotations

from omni_kvlink.bench.latency import BESIDE, PHASES, Result, bars, notes
from omni_kvlink.bench.report import table, wrapped
from omni_kvlink.bench.stats import Summary

_MEANING = {
    "prepare": "plan, reserve",
    "copy": "gather into the link's memory; direct: digests",
    "publish": "write the header",
    "wake": "commit → the waiting get has it",
    "view": "manifest decoded, tensors made",
    "verify": "digests checked by the reader",
    "total": "put called → views in hand",
    "put": "put called → put returned",
    "release": "last view gone → receipt settled",
    "plain_copy": "as many bytes, one thread",
    "pipe_wake": "a pipe wakes the same reader",
}


def latency_text(result: Result) -> str:
    """Everything that was measured, at most 96 columns wide."""
    setup = result.setup
    names = [name for name in (*PHASES, *BESIDE) if name != "verify" or setup.verify == "full"]
    rows = [_row(name, result.milliseconds(name)) for name in names]
    blocks = [
        _setup_lines(result),
        table(["ms", "p50", "p90", "p99", "min", "max", "what"], rows),
        "\n".join(_lines(result)),
    ]
    return "\n\n".join(blocks)


def _setup_lines(result: Result) -> str:
    setup = result.setup
    branches = f", {setup.branches} branches" if setup.branches else ""
    lines = [
        wrapped("payload", f"{setup.shape} = {setup.shape.nbytes / 1e6:.3f} MB{branches}"),
        wrapped(
            "link",
            f"{setup.connector}, mode {setup.mode}, copier {result.ledger.copier}, "
            f"digests {result.ledger.digests}, verify {setup.verify}, "
            f"sources {'paged' if setup.paged else 'contiguous'}{', direct' * setup.direct}, "
            f"torch threads {setup.threads}",
        ),
        wrapped("rounds", f"{len(result.rounds)} after {setup.warmup} to warm up"),
    ]
    return "\n".join(lines + [wrapped("note", note) for note in notes(setup)])


def _row(name: str, summary: Summary) -> list[str]:
    values = (summary.p50, summary.p90, summary.p99, summary.min, summary.max)
    return [name.replace("_", " "), *(f"{value:.3f}" for value in values), _MEANING[name]]


def _bare_lines(result: Result) -> list[str]:
    lines = []
    for yardstick in result.yardsticks:
        bare, ratio = result.bare(yardstick), result.bare_ratio(yardstick)
        text = f"{yardstick.phase} = {ratio:.2f} × {yardstick.text}, which took {bare.p50:.3f} ms"
        name = yardstick.name.replace("_", " ")
        lines.append(wrapped(name, f"{text} ({bare.min:.3f} to {bare.max:.3f})"))
    return lines


def _lines(result: Result) -> list[str]:
    by_round, faults = result.ratio_by_round, result.to_dict()["minor_faults"]
    pages = -(-result.setup.shape.nbytes // 4096)
    copy = result.milliseconds("copy").p50 / result.milliseconds("plain_copy").p50
    beyond = result.beyond_copy
    lines = [
        wrapped(
            "ratio",
            f"total = {result.ratio:.2f} × a plain copy (round by round {by_round.min:.2f} to "
            f"{by_round.max:.2f}), copy alone {copy:.2f} ×; plain copy: {result.plain}",
        ),
        *_bare_lines(result),
        wrapped("rate", f"{result.rate / 1e9:.2f} GB/s to views"),
        wrapped(
            "beyond",
            f"{beyond.p50:.3f} ms of the total are not the copy ({beyond.min:.3f} to "
            f"{beyond.max:.3f})",
        ),
        wrapped(
            "faults",
            f"minor page faults a warm round: producer {faults['producer']['p50']:.0f}, reader "
            f"{faults['reader']['p50']:.0f} (every page touched); the payload has {pages} pages",
        ),
    ]
    if result.cold is not None:
        lines.append(wrapped("cold", f"first round of all: {1e3 * result.cold.total:.3f} ms"))
    if result.setup.branches:
        reused = result.ledger.reused_nbytes / 1e6
        lines.append(wrapped("bundle", f"{reused:.3f} MB of branches not sent a second time"))
    if result.idle is not None:
        text = ", ".join(f"{side} {percent:.3f} %" for side, percent in result.idle.items())
        lines.append(wrapped("idle", f"CPU of a core while connected and waiting: {text}"))
    for bar in bars(result):
        state = "met" if bar["met"] else "MISSED"
        lines.append(
            wrapped("bar", f"{bar['bar']}: {bar['got']:g}, limit {bar['limit']:g}: {state}")
        )
    return lines
