"""The command line of `kvlink-bench`: its subcommands, and the options of each."""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.bench.setups import (
    BLOCK,
    PRESETS,
    READERS,
    CopySetup,
    FirstSetup,
    GrowingSetup,
    LatencySetup,
    ManySetup,
    StreamSetup,
    VerifySetup,
)
from omni_kvlink.cli.arguments import (
    COUNT,
    EVEN,
    PER_SECOND,
    POSITIVE,
    SECONDS,
    THREADS,
    NumberArgument,
    Parser,
    examples,
)
from omni_kvlink.connectors import registry
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.format import MAX_BRANCHES, MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

COPIERS = ("auto", "native", "pinned", "torch")


class Command(NamedTuple):
    """A subcommand: its module, which has `measure`, its setup's type, and its options."""

    module: str
    setup: type[Any]
    about: str
    example: str
    add_options: Callable[[Parser], None]


def make_parser() -> Parser:
    """The parser of all subcommands."""
    about = "how fast a link is on this machine, beside a plain copy of the same bytes"
    usual = examples(
        "kvlink-bench latency", "kvlink-bench latency --help", "kvlink-bench verify --quick"
    )
    parser = Parser(prog="kvlink-bench", description=about, epilog=usual)
    parser.add_version()
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", dest="command"
    )
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.about,
            description=command.about,
            epilog=examples(f"kvlink-bench {name}", f"kvlink-bench {name} {command.example}"),
            usage=f"kvlink-bench {name} [OPTION ...]",
        )
        command.add_options(subparser)
    keygen = commands.add_parser("keygen", add_help=False)  # until 0.3
    keygen.add_argument("arguments", nargs="*")
    return parser


def _add_payload(parser: Parser, presets: Sequence[str]) -> None:
    lines = "\n".join(f"  {name:<8} {PRESETS[name]}" for name in presets)
    about = f"a KV cache: layers × {{K, V}} × [tokens, heads, head dim]; the presets:\n{lines}"
    add = parser.group("payload", about).add_argument
    add("--preset", default="bagel", choices=presets, help="one of those above (default: bagel)")
    layers = NumberArgument("a whole number", 1, MAX_LAYERS)
    add("--layers", type=layers, metavar="N", help="layers of the model, instead of the preset's")
    add("--tokens", type=POSITIVE, metavar="N", help="tokens in the cache")
    add("--heads", type=POSITIVE, metavar="N", help="heads of the keys, and of the values")
    add("--head-dim", type=POSITIVE, metavar="N", help="elements of a head, for one token")
    types = f"dtype of the elements: {', '.join(KV_DTYPES)} (default: bfloat16)"
    add("--dtype", choices=tuple(KV_DTYPES), metavar="NAME", help=types)


def _add_link(parser: Parser) -> None:
    add = parser.group("link").add_argument
    connectors = f"how the two processes are connected: {', '.join(_schemes())} (default: shm)"
    add("--connector", default="shm", choices=_schemes(), metavar="NAME", help=connectors)
    url = "the link's whole URL, with address and options, instead of --connector"
    add("--url", default=argparse.SUPPRESS, type=_link_url, help=url)
    modes = "memory of the payloads: pooled arenas (default), or a sealed file for each"
    add("--mode", default="pooled", choices=("pooled", "sealed"), help=modes)
    copiers = f"what copies the bytes: {', '.join(COPIERS)} (default: auto, the fastest)"
    add("--copier", default="auto", choices=COPIERS, metavar="NAME", help=copiers)


def _add_inline(parser: Parser) -> None:
    add = parser.group("link").add_argument
    limit, usual = NumberArgument("a number of bytes", 0, INLINE), LatencySetup.inline
    largest = (
        "bytes of the largest payload that is sent inside the message that offers it "
        f"(default: {usual}; without BYTES: {INLINE})"
    )
    add(
        "--inline",
        type=limit,
        nargs="?",
        const=INLINE,
        default=usual,
        metavar="BYTES",
        help=largest,
    )
    no_digests = "compute no CRC-32C while copying"
    add("--no-digests", action="store_false", dest="digests", help=no_digests)


def _add_number(
    parser: Parser,
    group: str,
    setup: type[Any],
    name: str,
    about: str,
    kind: NumberArgument = POSITIVE,
    metavar: str = "N",
) -> None:
    """An option that takes a number; its default is that of the setup's field of this name."""
    usual = getattr(setup, name)
    text = f"{about} (default: {usual:g})"
    add = parser.group(group).add_argument
    add(f"--{name}", type=kind, default=usual, metavar=metavar, help=text)


def _add_corrupt(parser: Parser) -> None:
    number = NumberArgument("a whole number", -1)
    parser.add_argument("--corrupt", type=number, default=-1, help=argparse.SUPPRESS)


def _add_output(parser: Parser) -> None:
    add = parser.group("output").add_argument
    document = (
        "write setup, machine and result there as JSON; '-': to standard output, nothing else"
    )
    add("--json", default="", metavar="FILE", help=document)


def _add_transfers(parser: Parser, paged: str, setup: type[LatencySetup | StreamSetup]) -> None:
    _add_payload(parser, tuple(PRESETS))
    parser.group("payload").add_argument("--paged", action="store_true", help=paged)
    _add_link(parser)
    _add_number(parser, "measurement", setup, "rounds", "rounds that are counted")
    _add_number(parser, "measurement", setup, "warmup", "rounds before", COUNT)


def _add_latency(parser: Parser) -> None:
    paged = f"it lies in pools: blocks of {BLOCK} tokens in random order, read by a block table"
    _add_transfers(parser, paged, LatencySetup)
    add, most = (
        parser.group("payload").add_argument,
        NumberArgument("a whole number", 1, MAX_BRANCHES),
    )
    bundle = "send a bundle of N: one branch with bytes, the others in turn half of it and the same"
    add("--branches", type=most, default=0, metavar="N", help=bundle)
    _add_inline(parser)
    add = parser.group("link").add_argument
    add("--direct", action="store_true", help="put(direct=True): nothing is copied (zmq, ucx)")
    digests = (
        "which the reader checks: full: all; auto: of bytes from a socket (default); off: none"
    )
    add("--verify", default="auto", choices=("auto", "full", "off"), help=f"digests {digests}")
    add = parser.group("measurement").add_argument
    busy = "put others just before: the producer's code is in the processor's caches"
    add("--busy", action="store_true", help=busy)
    threads = "threads of torch, at both ends"
    _add_number(parser, "measurement", LatencySetup, "threads", threads, THREADS)
    idle = "measure the CPU of the waiting link, too, for so long"
    add("--idle", type=SECONDS, default=0.0, metavar="SECONDS", help=idle)
    _add_output(parser)


def _add_stream(parser: Parser) -> None:
    paged = f"it is read out of blocks of {BLOCK} tokens in random order, and written into such"
    _add_transfers(parser, paged, StreamSetup)
    _add_output(parser)


def _add_first(parser: Parser) -> None:
    _add_payload(parser, tuple(PRESETS))
    _add_link(parser)
    add = partial(_add_number, parser, "measurement", FirstSetup)
    add("rounds", "links of each kind")
    add("wait", "between a link's opening and its first transfer", SECONDS, "SECONDS")
    _add_output(parser)


def _add_copy(parser: Parser) -> None:
    _add_payload(parser, ("small", "bagel", "bagel36"))
    add = partial(_add_number, parser, "measurement", CopySetup)
    add("rounds", "times that each method is timed")
    add("threads", "threads of torch", THREADS)
    _add_output(parser)


def _add_growing(parser: Parser) -> None:
    usual, add = GrowingSetup, partial(_add_number, parser, "chunks", GrowingSetup)
    add("streams", "streams that grow at the same time")
    add("rate", "chunks a second of each stream", PER_SECOND)
    add("tokens", "tokens of a chunk")
    add("hidden", "elements of a token")
    together = "the chunks of all streams are due at the same moment, as after a batched step"
    parser.group("chunks").add_argument("--together", action="store_true", help=together)
    _add_link(parser)
    _add_inline(parser)
    add, positive = partial(_add_number, parser, "measurement", usual), replace(SECONDS, least=0.01)
    add("rounds", "rounds of link and pipe, in turn")
    add("seconds", "for the link, and for the pipe, all rounds together", positive, "SECONDS")
    waits = (
        f"how the reader's one thread waits for all streams (default: {usual.reader}); steps: one "
        "stream carries them, each chunk of it what is due together (append_requests)"
    )
    add_choice = parser.group("measurement").add_argument
    add_choice("--reader", choices=READERS, default=usual.reader, help=waits)
    _add_corrupt(parser)
    _add_output(parser)


def _add_many(parser: Parser) -> None:
    add = partial(_add_number, parser, "payloads", ManySetup)
    add("bytes", "bytes of a payload, an even number", EVEN, "BYTES")
    add("transfers", "payloads of a run")
    add("outstanding", "gets requested, and payloads not yet released")
    add("batch", "payloads of one put_many, and of one get_many")
    add("live", "payloads that nobody reads, live meanwhile; compared with 10")
    _add_link(parser)
    _add_inline(parser)
    rounds = "rounds, each with a run of every kind"
    _add_number(parser, "measurement", ManySetup, "rounds", rounds)
    _add_corrupt(parser)
    _add_output(parser)


def _add_verify(parser: Parser) -> None:
    _add_link(parser)
    add = parser.group("measurement").add_argument
    add("--quick", action="store_true", help="send a sixth of the cases, small ones")
    _add_corrupt(parser)
    _add_output(parser)


@functools.cache
def _schemes() -> list[str]:
    """The connectors' schemes; to find them, the metadata of every installed package is read."""
    return registry.schemes()


def _link_url(text: str) -> str:
    schemes = _schemes()
    try:
        is_known = registry.split_url(text)[0] in schemes
    except ValueError:
        is_known = False
    if not is_known:
        urls = ", ".join(f"{name}://…" for name in schemes)
        raise argparse.ArgumentTypeError(f"wanted the URL of a link ({urls}), got {text!r}")
    return text


COMMANDS = {
    "latency": Command(
        "latency",
        LatencySetup,
        "how long it takes from put until the reader has the views, phase by phase",
        "--preset small --rounds 100 --json latency.json",
        _add_latency,
    ),
    "stream": Command(
        "streaming",
        StreamSetup,
        "how long it takes until the reader has copied all out: as a whole, and layer by layer",
        "--paged",
        _add_stream,
    ),
    "growing": Command(
        "growing",
        GrowingSetup,
        "how long a chunk of a growing stream is on its way, many streams at once, beside a pipe",
        "--together --reader asyncio",
        _add_growing,
    ),
    "many": Command(
        "many",
        ManySetup,
        "how many small payloads pass in a second, singly and in batches, beside a pipe",
        "--inline 0 --batch 8",
        _add_many,
    ),
    "first": Command(
        "first",
        FirstSetup,
        "how much longer the first transfer of a link takes than its tenth, prefaulted and not",
        "--connector zmq+tcp",
        _add_first,
    ),
    "copy": Command(
        "membench",
        CopySetup,
        "what this machine's memory allows: methods to copy as many bytes, timed in turn",
        "--preset small --rounds 100",
        _add_copy,
    ),
    "verify": Command(
        "verify",
        VerifySetup,
        "whether every payload arrives bit for bit, by digests that the library has no part in",
        "--quick --connector zmq+tcp",
        _add_verify,
    ),
}
