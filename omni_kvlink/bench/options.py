"""The command line of `kvlink-bench`: its subcommands, and the options of each."""

from __future__ import annotations

import argparse
import functools
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.bench.setups import (
    BLOCK,
    PRESETS,
    READERS,
    CopySetup,
    FirstSetup,
    GrowingSetup,
    LatencySetup,
    LinkSetup,
    ManySetup,
    SmallSetup,
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
    from collections.abc import Sequence
    from typing import Any

COPIERS = ("auto", "native", "pinned", "torch")


class Option(NamedTuple):
    """An option for a field of a setup, which has its default: a number, a choice or a flag."""

    group: str
    name: str
    text: str
    kind: NumberArgument | tuple[str, ...] | None = POSITIVE


class Command(NamedTuple):
    """A subcommand: its module, which has `measure`, its setup's type, and its own options."""

    module: str
    setup: type[Any]
    about: str
    example: str
    options: tuple[Option, ...]
    presets: tuple[str, ...] = tuple(PRESETS)


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
        _add_options(subparser, command)
    keygen = commands.add_parser("keygen", add_help=False)  # until 0.3
    keygen.add_argument("arguments", nargs="*")
    return parser


def _add_options(parser: Parser, command: Command) -> None:
    """Add the options of a command, in the order in which `--help` lists them."""
    setup, names = command.setup, [field.name for field in fields(command.setup)]
    if "shape" in names:
        _add_payload(parser, command.presets)
    for is_payload in (True, False):
        for option in command.options:
            if is_payload is (option.group not in ("link", "measurement")):
                _add_option(parser, option, getattr(setup, option.name))
        if is_payload and issubclass(setup, LinkSetup):
            _add_link(parser)
            if issubclass(setup, SmallSetup):
                _add_inline(parser)
    if "corrupt" in names:
        number = NumberArgument("a whole number", -1)
        parser.add_argument("--corrupt", type=number, default=-1, help=argparse.SUPPRESS)
    about = "write setup, machine and result there as JSON; '-': to standard output, nothing else"
    parser.group("output").add_argument("--json", default="", metavar="FILE", help=about)


def _add_option(parser: Parser, option: Option, default: Any) -> None:
    add, name = parser.group(option.group).add_argument, f"--{option.name}"
    if option.kind is None:
        add(name, action="store_true", help=option.text)
    elif isinstance(option.kind, tuple):
        add(name, choices=option.kind, default=default, help=option.text)
    else:
        text = f"{option.text} (default: {default:g})" if default else option.text
        add(name, type=option.kind, default=default, metavar=option.kind.metavar, help=text)


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
    size = (
        "bytes of the largest payload that is sent inside the message that offers it "
        f"(default: {usual}; without BYTES: {INLINE})"
    )
    add("--inline", type=limit, nargs="?", const=INLINE, default=usual, metavar="BYTES", help=size)
    no_digests = "compute no CRC-32C while copying"
    add("--no-digests", action="store_false", dest="digests", help=no_digests)


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


_POOLS = f"it lies in pools: blocks of {BLOCK} tokens in random order, read by a block table"
_BLOCKS = f"it is read out of blocks of {BLOCK} tokens in random order, and written into such"
_BRANCHES = "send a bundle of N: one branch with bytes, the others in turn half of it and the same"
_DIGESTS = "which the reader checks: full: all; auto: of bytes from a socket (default); off: none"
_BUSY = "put others just before: the producer's code is in the processor's caches"
_IDLE = "measure the CPU of the waiting link, too, for so long"
_TOGETHER = "the chunks of all streams are due at the same moment, as after a batched step"
_SECONDS = "for the link, and for the pipe, all rounds together"
_READER = (
    f"how the reader's one thread waits for all streams (default: {GrowingSetup.reader}); steps: "
    "one stream carries them, each chunk of it what is due together (append_requests)"
)
_LIVE = "payloads that nobody reads, live meanwhile; compared with 10"
_WAIT = "between a link's opening and its first transfer"
_ROUNDS = Option("measurement", "rounds", "rounds that are counted")
_WARMUP = Option("measurement", "warmup", "rounds before", COUNT)

COMMANDS = {
    "latency": Command(
        "latency",
        LatencySetup,
        "how long it takes from put until the reader has the views, phase by phase",
        "--preset small --rounds 100 --json latency.json",
        (
            Option("payload", "paged", _POOLS, None),
            Option("payload", "branches", _BRANCHES, replace(POSITIVE, most=MAX_BRANCHES)),
            Option("link", "direct", "put(direct=True): nothing is copied (zmq, ucx)", None),
            Option("link", "verify", f"digests {_DIGESTS}", ("auto", "full", "off")),
            _ROUNDS,
            _WARMUP,
            Option("measurement", "busy", _BUSY, None),
            Option("measurement", "threads", "threads of torch, at both ends", THREADS),
            Option("measurement", "idle", _IDLE, SECONDS),
        ),
    ),
    "stream": Command(
        "streaming",
        StreamSetup,
        "how long it takes until the reader has copied all out: as a whole, and layer by layer",
        "--paged",
        (Option("payload", "paged", _BLOCKS, None), _ROUNDS, _WARMUP),
    ),
    "growing": Command(
        "growing",
        GrowingSetup,
        "how long a chunk of a growing stream is on its way, many streams at once, beside a pipe",
        "--together --reader asyncio",
        (
            Option("chunks", "streams", "append streams at the same time"),
            Option("chunks", "rate", "chunks a second of each stream", PER_SECOND),
            Option("chunks", "tokens", "tokens of a chunk"),
            Option("chunks", "hidden", "elements of a token"),
            Option("chunks", "together", _TOGETHER, None),
            Option("measurement", "rounds", "rounds of link and pipe, in turn"),
            Option("measurement", "seconds", _SECONDS, replace(SECONDS, least=0.01)),
            Option("measurement", "reader", _READER, READERS),
        ),
    ),
    "many": Command(
        "many",
        ManySetup,
        "how many small payloads pass in a second, singly and in batches, beside a pipe",
        "--inline 0 --batch 8",
        (
            Option("payloads", "bytes", "bytes of a payload, an even number", EVEN),
            Option("payloads", "transfers", "payloads of a run"),
            Option("payloads", "outstanding", "gets requested, and payloads not yet released"),
            Option("payloads", "batch", "payloads of one put_many, and of one get_many"),
            Option("payloads", "live", _LIVE),
            Option("measurement", "rounds", "rounds, each with a run of every kind"),
        ),
    ),
    "first": Command(
        "first",
        FirstSetup,
        "how much longer the first transfer of a link takes than its tenth, prefaulted and not",
        "--connector zmq+tcp",
        (
            Option("measurement", "rounds", "links of each kind"),
            Option("measurement", "wait", _WAIT, SECONDS),
        ),
    ),
    "copy": Command(
        "membench",
        CopySetup,
        "what this machine's memory allows: methods to copy as many bytes, timed in turn",
        "--preset small --rounds 100",
        (
            Option("measurement", "rounds", "times that each method is timed"),
            Option("measurement", "threads", "threads of torch", THREADS),
        ),
        ("small", "bagel", "bagel36"),
    ),
    "verify": Command(
        "verify",
        VerifySetup,
        "whether every payload arrives bit for bit, by digests that the library has no part in",
        "--quick --connector zmq+tcp",
        (Option("measurement", "quick", "send a sixth of the cases, small ones", None),),
    ),
}
