"""`kvlink-bench`: how fast a link is on this machine, and whether it is exact."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.bench import (
    first,
    growing,
    latency,
    machine,
    many,
    membench,
    report,
    streaming,
    verify,
)
from omni_kvlink.bench.chunks import READERS
from omni_kvlink.bench.payloads import BLOCK, Shape
from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.errors import IntegrityError, KVLinkError
from omni_kvlink.payload.dtypes import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

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
        return _keygen() if arguments.command == "keygen" else _run(arguments)
    except KVLinkError as error:
        print(f"kvlink-bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, IntegrityError) else 2
    except KeyboardInterrupt:
        print("kvlink-bench: interrupted", file=sys.stderr)
        return 130


def _keygen() -> int:
    """Moved: use `kvlink keygen DIRECTORY NAME`."""
    print("kvlink-bench: keygen has moved; use kvlink keygen DIRECTORY NAME", file=sys.stderr)
    return 2


def _run(arguments: argparse.Namespace) -> int:
    """Measure, write the document, and print the report."""
    command, quiet = COMMANDS[arguments.command], arguments.json == "-"
    given = vars(arguments)
    if "preset" in given:
        names = ("layers", "tokens", "heads", "head_dim", "dtype")
        sizes = {name: given[name] for name in names if given[name] is not None}
        given["shape"] = dataclasses.replace(PRESETS[arguments.preset], **sizes)
    if given.get("url"):
        given["connector"] = arguments.url.partition("://")[0]
    setup = command.setup(**{f.name: given[f.name] for f in dataclasses.fields(command.setup)})
    result = command.module.measure(setup, partial(report.progress, quiet=quiet))
    here = machine.describe()
    if arguments.json:
        parts = (dataclasses.asdict(setup), result.to_dict())
        report.write_json(arguments.json, arguments.command, here, *parts)
    if not quiet:
        about = report.wrapped("machine", machine.one_line(here))
        print(f"kvlink-bench {arguments.command}", about, result.text(), sep="\n")
        if isinstance(result, membench.CopyResult):
            report.draw([(key.replace("_", " "), result.rate(key)) for key in result.what], "GB/s")
        if isinstance(result, growing.GrowingResult):
            report.draw(result.drawn(), "µs of CPU a chunk")
        if isinstance(result, many.ManyResult):
            report.draw(result.drawn(), "transfers a second")
    compares = isinstance(result, (verify.Verdict, growing.GrowingResult, many.ManyResult))
    return 1 if compares and result.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlink-bench", description=__doc__, epilog=_EPILOG, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        about = command.module.__doc__
        command.add_options(commands.add_parser(name, help=about, description=about))
    keygen = commands.add_parser("keygen", help=_keygen.__doc__)  # until 0.3
    keygen.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    return parser


def _add_link(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connector", default="shm", help="shm (two processes), inproc (one), … (default: shm)")
    add("--url", default="", help="the whole URL, for a connector that needs an address")
    add("--mode", default="pooled", choices=("pooled", "sealed"), help="whose memory files")
    add("--copier", default="auto", help="'auto' or the name of one")
    add("--json", default="", metavar="FILE", help="write the result there; '-': standard output")


def _add_rounds(
    parser: argparse.ArgumentParser, presets: Sequence[str], *, rounds: int = 20
) -> None:
    add = parser.add_argument
    sizes = "; ".join(f"{name}: {PRESETS[name]}" for name in presets)
    add("--preset", default="bagel", choices=presets, help=f"(default: bagel) {sizes}")
    for name in ("--layers", "--tokens", "--heads", "--head-dim"):
        add(name, type=_positive)
    add("--dtype", choices=tuple(KV_DTYPES))
    add("--rounds", type=_positive, default=rounds)


def _add_transfers(parser: argparse.ArgumentParser, paged: str) -> None:
    _add_link(parser)
    _add_rounds(parser, tuple(PRESETS))
    add = parser.add_argument
    add("--paged", action="store_true", help=paged)
    add("--warmup", type=_count, default=3, help="rounds not counted (default: 3)")


def _add_copy(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser, ("small", "bagel", "bagel36"))
    add = parser.add_argument
    add("--threads", type=_positive, default=1, help="torch's (default: 1)")
    add("--json", default="", metavar="FILE", help="write the result there; '-': standard output")


def _add_latency(parser: argparse.ArgumentParser) -> None:
    blocks = f"blocks of {BLOCK} tokens in random order"
    _add_transfers(parser, f"sources in pools: {blocks}, read by a block table")
    add = parser.add_argument
    bundle = "send a bundle: one branch with bytes, the others in turn half of it and the same"
    add("--branches", type=_positive, default=0, help=bundle)
    _add_inline(parser)
    add("--direct", action="store_true", help="put(direct=True): nothing is copied (zmq, ucx)")
    busy = "put others just before: the producer's code is in the processor's caches"
    add("--busy", action="store_true", help=busy)
    no_digests = "no CRC-32C while copying"
    add("--no-digests", action="store_false", dest="digests", help=no_digests)
    add(
        "--verify",
        default="auto",
        choices=("auto", "full", "off"),
        help="full: the reader checks every digest; auto: those of bytes from a socket; off: none",
    )
    add("--threads", type=_positive, default=1, help="torch's, at both ends (default: 1)")
    add("--idle", type=float, default=0.0, metavar="SECONDS", help="measure the idle CPU so long")


def _add_stream(parser: argparse.ArgumentParser) -> None:
    _add_transfers(parser, f"out of blocks of {BLOCK} tokens in random order, and into such")


def _add_first(parser: argparse.ArgumentParser) -> None:
    _add_link(parser)
    _add_rounds(parser, tuple(PRESETS), rounds=5)
    opened = "seconds between the link's opening and its first transfer (default: 2)"
    parser.add_argument("--wait", type=float, default=2.0, metavar="SECONDS", help=opened)


def _add_growing(parser: argparse.ArgumentParser) -> None:
    _add_link(parser)
    add, usual = parser.add_argument, growing.GrowingSetup("")
    add("--streams", type=_positive, default=usual.streams, help="(default: %(default)s)")
    add("--rate", type=float, default=usual.rate, help="chunks a second of each (%(default)g)")
    add("--seconds", type=float, default=usual.seconds, help="of link and pipe each (%(default)g)")
    add("--rounds", type=_positive, default=usual.rounds, help="that alternate (%(default)s)")
    add("--tokens", type=_positive, default=usual.tokens, help="of a chunk (%(default)s)")
    add("--hidden", type=_positive, default=usual.hidden, help="elements a token (%(default)s)")
    together = "the chunks of all streams are due at the same moment, as after a batched step"
    add("--together", action="store_true", help=together)
    waits = (
        "how the reader's one thread waits for all streams (default: callbacks); steps: one stream "
        "carries them, each chunk of it what is due together (append_requests)"
    )
    add("--reader", choices=tuple(READERS), default=usual.reader, help=waits)
    _add_inline(parser)
    no_digests = "no CRC-32C while copying"
    add("--no-digests", action="store_false", dest="digests", help=no_digests)
    add("--corrupt", type=int, default=-1, help=argparse.SUPPRESS)


def _add_many(parser: argparse.ArgumentParser) -> None:
    _add_link(parser)
    add, usual = parser.add_argument, many.ManySetup("")
    payload = "of a payload, an even number (default: %(default)s)"
    add("--bytes", type=_even, default=usual.bytes, help=payload)
    add("--transfers", type=_positive, default=usual.transfers, help="of a run (%(default)s)")
    outstanding = "gets requested, and payloads put and not yet released (%(default)s)"
    add("--outstanding", type=_positive, default=usual.outstanding, help=outstanding)
    add("--batch", type=_positive, default=usual.batch, help="of put_many, get_many (%(default)s)")
    live = "payloads that nobody reads, live meanwhile; 10 to compare with (%(default)s)"
    add("--live", type=_positive, default=usual.live, help=live)
    add("--rounds", type=_positive, default=usual.rounds, help="(default: %(default)s)")
    _add_inline(parser)
    no_digests = "no CRC-32C while copying"
    add("--no-digests", action="store_false", dest="digests", help=no_digests)
    add("--corrupt", type=int, default=-1, help=argparse.SUPPRESS)


def _add_inline(parser: argparse.ArgumentParser) -> None:
    what = "the link's inline=, in bytes; without a number the largest (default: %(default)s)"
    parser.add_argument(
        "--inline", type=_count, nargs="?", const=INLINE, default=Options.inline, help=what
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_link(parser)
    parser.add_argument("--quick", action="store_true", help="a sixth of the cases, small ones")
    parser.add_argument("--corrupt", type=int, default=-1, help=argparse.SUPPRESS)


class Command(NamedTuple):
    """A module with `measure`, and its setup, whose fields are options of the command."""

    module: ModuleType
    setup: type[Any]
    add_options: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "latency": Command(latency, latency.LatencySetup, _add_latency),
    "stream": Command(streaming, streaming.StreamSetup, _add_stream),
    "growing": Command(growing, growing.GrowingSetup, _add_growing),
    "many": Command(many, many.ManySetup, _add_many),
    "first": Command(first, first.FirstSetup, _add_first),
    "copy": Command(membench, membench.CopySetup, _add_copy),
    "verify": Command(verify, verify.VerifySetup, _add_verify),
}


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def _even(text: str) -> int:
    number = _at_least(2, text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd")
    return number


_positive, _count = partial(_at_least, 1), partial(_at_least, 0)
