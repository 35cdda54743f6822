"""`kvlink-bench`: how fast a link is on this machine, and whether it is exact."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench import latency, machine, membench, report, streaming, verify
from omni_kvlink.bench.cases import cases
from omni_kvlink.bench.payloads import BLOCK, Shape
from omni_kvlink.errors import KVLinkError
from omni_kvlink.payload.manifest import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

PRESETS = {
    "tiny": Shape(1, 1, 1, 1024),
    "small": Shape(28, 64, 4, 128),
    "bagel": Shape(28, 4096, 4, 128),
    "bagel36": Shape(36, 4096, 4, 128),
}

_EPILOG = """exit status: 0 done, 1 a comparison failed, 2 wrong usage or the link cannot be made"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except KVLinkError as error:
        print(f"kvlink-bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvlink-bench: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlink-bench", description=__doc__, epilog=_EPILOG, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_latency(commands.add_parser("latency", help=latency.__doc__, description=latency.__doc__))
    _add_stream(
        commands.add_parser("stream", help=streaming.__doc__, description=streaming.__doc__)
    )
    _add_copy(commands.add_parser("copy", help=membench.__doc__, description=membench.__doc__))
    _add_verify(commands.add_parser("verify", help=verify.__doc__, description=verify.__doc__))
    keygen = commands.add_parser("keygen", help=_keygen.__doc__)  # until 0.3
    keygen.set_defaults(run=_keygen)
    keygen.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    return parser


def _add_link(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connector", default="shm", help="shm (two processes), inproc (one), … (default: shm)")
    add("--url", default="", help="the whole URL, for a connector that needs an address")
    add("--mode", default="pooled", choices=("pooled", "sealed"), help="whose memory files")
    add("--copier", default="auto", help="'auto' or the name of one")
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    text = "write the result there; '-': standard output"
    parser.add_argument("--json", default="", metavar="FILE", help=text)


def _add_shape(parser: argparse.ArgumentParser, presets: Sequence[str]) -> None:
    add = parser.add_argument
    sizes = "; ".join(f"{name}: {PRESETS[name]}" for name in presets)
    add("--preset", default="bagel", choices=presets, help=f"(default: bagel) {sizes}")
    add("--layers", type=_positive)
    add("--tokens", type=_positive)
    add("--heads", type=_positive)
    add("--head-dim", type=_positive)
    add("--dtype", choices=tuple(KV_DTYPES))


def _shape(arguments: argparse.Namespace) -> Shape:
    given = {
        name: getattr(arguments, name)
        for name in ("layers", "tokens", "heads", "head_dim", "dtype")
        if getattr(arguments, name) is not None
    }
    return dataclasses.replace(PRESETS[arguments.preset], **given)


def _add_copy(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_copy)
    _add_shape(parser, ("small", "bagel", "bagel36"))
    _add_json(parser)
    parser.add_argument("--rounds", type=_positive, default=20)
    parser.add_argument("--threads", type=_positive, default=1, help="torch's (default: 1)")


def _add_latency(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_latency)
    _add_link(parser)
    _add_shape(parser, tuple(PRESETS))
    add = parser.add_argument
    add(
        "--paged",
        action="store_true",
        help=f"sources in pools: blocks of {BLOCK} tokens in random order, read by a block table",
    )
    add(
        "--branches",
        type=_positive,
        default=0,
        help="send a bundle: one branch with bytes, the others in turn half of it and the same",
    )
    add("--rounds", type=_positive, default=20)
    add("--warmup", type=_count, default=3, help="rounds not counted (default: 3)")
    add("--direct", action="store_true", help="put(direct=True): nothing is copied (zmq, ucx)")
    add("--no-digests", action="store_true", help="no CRC-32C while copying")
    add("--verify", default="auto", choices=("auto", "full"), help="full: the reader checks them")
    add("--threads", type=_positive, default=1, help="torch's, at both ends (default: 1)")
    add("--idle", type=float, default=0.0, metavar="SECONDS", help="measure the idle CPU so long")


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_stream)
    _add_link(parser)
    _add_shape(parser, tuple(PRESETS))
    text = f"out of blocks of {BLOCK} tokens in random order, and into such"
    parser.add_argument("--paged", action="store_true", help=text)
    parser.add_argument("--rounds", type=_positive, default=20)
    parser.add_argument("--warmup", type=_count, default=3, help="rounds not counted (default: 3)")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_verify)
    _add_link(parser)
    parser.add_argument("--quick", action="store_true", help="a sixth of the cases, small ones")
    parser.add_argument("--corrupt", type=int, default=-1, help=argparse.SUPPRESS)


def _keygen(arguments: argparse.Namespace) -> int:
    """Moved: use `kvlink keygen DIRECTORY NAME`."""
    print("kvlink-bench: keygen has moved; use kvlink keygen DIRECTORY NAME", file=sys.stderr)
    return 2


def _copy(arguments: argparse.Namespace) -> int:
    setup = membench.CopySetup(_shape(arguments), arguments.rounds, arguments.threads)
    quiet = arguments.json == "-"
    with report.progress("rounds", setup.rounds, quiet=quiet) as step:
        result = membench.measure(setup, step)
    _finish("copy", arguments, dataclasses.asdict(setup), result.to_dict(), result.text())
    if not quiet:
        report.draw([(row.key.replace("_", " "), row.rate) for row in result.rows], "GB/s")
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    setup = latency.LatencySetup(
        connector=arguments.url.partition("://")[0] or arguments.connector,
        url=arguments.url,
        shape=_shape(arguments),
        paged=arguments.paged,
        branches=arguments.branches,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        mode=arguments.mode,
        digests=not arguments.no_digests,
        copier=arguments.copier,
        verify=arguments.verify,
        threads=arguments.threads,
        idle=arguments.idle,
        direct=arguments.direct,
    )
    quiet = arguments.json == "-"
    with report.progress("rounds", setup.warmup + setup.rounds, quiet=quiet) as step:
        result = latency.measure(setup, step)
    results = {**result.to_dict(), "bars": latency.bars(result), "notes": latency.notes(setup)}
    _finish("latency", arguments, dataclasses.asdict(setup), results, result.text())
    return 0


def _stream(arguments: argparse.Namespace) -> int:
    setup = streaming.StreamSetup(
        connector=arguments.url.partition("://")[0] or arguments.connector,
        shape=_shape(arguments),
        url=arguments.url,
        paged=arguments.paged,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        copier=arguments.copier,
    )
    quiet = arguments.json == "-"
    with report.progress("rounds", setup.warmup + setup.rounds, quiet=quiet) as step:
        result = streaming.measure(setup, step)
    _finish("stream", arguments, dataclasses.asdict(setup), result.to_dict(), result.text())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    chosen = list(cases(quick=arguments.quick))
    with report.progress("cases", len(chosen), quiet=arguments.json == "-") as step:
        verdict = verify.run(
            arguments.connector,
            chosen,
            step,
            url=arguments.url,
            copier=arguments.copier,
            mode=arguments.mode,
            corrupt=arguments.corrupt,
        )
    names = ("connector", "url", "mode", "copier", "quick")
    setup = {name: getattr(arguments, name) for name in names}
    _finish("verify", arguments, setup, verdict.to_dict(), verdict.text())
    return 1 if verdict.failed else 0


def _finish(
    command: str,
    arguments: argparse.Namespace,
    setup: dict[str, Any],
    results: dict[str, Any],
    text: str,
) -> None:
    here = machine.describe()
    if arguments.json:
        report.write_json(arguments.json, report.document(command, here, setup, results))
    if arguments.json != "-":
        print(report.heading(command, here), text, sep="\n")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return number
