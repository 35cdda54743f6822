"""The subcommands of `kvlink-bench`: a setup for each, an option for each of its fields.

Each measures, prints its report and writes its document.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from importlib import import_module
from typing import TYPE_CHECKING

from omni_kvlink.bench import report
from omni_kvlink.bench.remote_address import connected_url, served_url
from omni_kvlink.bench.setups import (
    COMMANDS,
    PEERS,
    PRESETS,
    LatencySetup,
    LinkSetup,
    Option,
    SmallSetup,
)
from omni_kvlink.cli import terminal
from omni_kvlink.cli.arguments import POSITIVE, NumberArgument, Parser, examples
from omni_kvlink.cli.process import held, interruptible, run_guarded, show
from omni_kvlink.connectors import registry
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.payload.dtypes import KV_DTYPES
from omni_kvlink.payload.format import MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

COPIERS = ("auto", "native", "pinned", "torch")
RENAMED = {
    "keygen": "has moved; use kvlink keygen DIRECTORY NAME",  # until 0.3
    "growing": "is now append-stream; use kvlink-bench append-stream",
    "first": "has moved; use python benchmarks/first_transfer.py of a checkout",
}
"""Subcommands of former versions, and what to use."""
_COPIES = 3
"""Buffers as large as the payload that a measurement has at once, at least."""


def run(argv: Sequence[str]) -> int:
    """Run one command line in this process; return the exit status."""
    arguments = parse(argv)
    return run_guarded("kvlink-bench", lambda: perform(arguments))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; SystemExit for wrong usage, `--help` and `--version`."""
    parser = make_parser()
    for name in set(argv[:1]) & set(RENAMED):
        parser.exit(2, f"kvlink-bench: {name} {RENAMED[name]}\n")
    return parser.parse_args(argv)


def perform(arguments: argparse.Namespace) -> int:
    """Measure what a command line of `kvlink-bench` says; return the exit status."""
    kind = COMMANDS[arguments.command]

    def measure(setup: Any, progress: Any) -> Any:
        return import_module(f"omni_kvlink.bench.{kind.module}").measure(setup, progress)

    return run_setup(f"kvlink-bench {arguments.command}", kind, measure, arguments)


def run_setup(
    command: str, kind: type[Any], measure: Callable[..., Any], arguments: argparse.Namespace
) -> int:
    """Measure, print the report, and write the document; return the exit status.

    `measure(setup, progress)` measures a setup of this kind, and returns its result.
    """
    is_quiet = arguments.json == "-"
    setup = _setup(kind, vars(arguments))
    report.check_json(arguments.json)
    machine = import_module("omni_kvlink.bench.machine")
    with interruptible():
        result = measure(setup, functools.partial(terminal.progress, quiet=is_quiet))
    description = machine.describe()
    if not is_quiet:
        about = report.wrapped("machine", machine.one_line(description))
        show("\n".join((command, about, result.text())))
        report.draw(*result.drawn)
    if arguments.json:
        parts = (dataclasses.asdict(setup), result.to_dict())
        with held():
            report.write_json(arguments.json, command.rpartition(" ")[2], description, *parts)
    return 1 if result.failed else 0


def _setup(kind: type[Any], values: dict[str, Any]) -> Any:
    """Make the setup to measure; `BenchError` if the machine's memory is too small for it."""
    if "preset" in values:
        names = ("layers", "tokens", "heads", "head_dim", "dtype")
        sizes = {name: values[name] for name in names if values[name] is not None}
        values["shape"] = shape = dataclasses.replace(PRESETS[values["preset"]], **sizes)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if _COPIES * shape.nbytes > memory:
            raise report.BenchError(
                f"{shape} is {shape.nbytes / 1e9:.1f} GB, and {_COPIES} copies of it must fit into "
                f"the {memory / 1e9:.1f} GB of this machine: give fewer --layers or --tokens"
            )
    if "python" in values:
        values["python"] = dict(values["python"])
    if issubclass(kind, LinkSetup) and "url" in values:
        values["connector"] = values["url"].partition("://")[0]
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in fields if name in values})


def make_parser() -> Parser:
    """The parser of all subcommands."""
    title = "how fast a link is on this machine, beside a plain copy of the same bytes"
    usual = examples(
        "kvlink-bench latency", "kvlink-bench latency --help", "kvlink-bench verify --quick"
    )
    parser = Parser(prog="kvlink-bench", description=title, epilog=usual)
    parser.add_version()
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", dest="command"
    )
    for name, setup in COMMANDS.items():
        operands = getattr(setup, "operands", {})
        plain = " ".join(("kvlink-bench", name, *getattr(setup, "operand_examples", ())))
        subparser = commands.add_parser(
            name,
            help=setup.about,
            description=setup.about,
            epilog=examples(plain, f"{plain} {setup.example}"),
            usage=" ".join(("kvlink-bench", name, *map(str.upper, operands), "[OPTION ...]")),
        )
        for operand, about in operands.items():
            action = subparser.add_argument(operand, metavar=operand.upper(), help=about)
            if operand == "url":
                action.type = served_url
        add_options(subparser, setup)
    return parser


def add_options(parser: Parser, setup: type[Any]) -> None:
    """Add the options of a setup's fields, in the order in which `--help` lists them."""
    by_name = {field.name: field for field in dataclasses.fields(setup)}
    if "shape" in by_name:
        _add_payload(parser, setup.presets)
    for is_payload in (True, False):
        for name, field in by_name.items():
            option = field.metadata.get("option")
            if option and is_payload is (option.group not in ("link", "measurement")):
                _add_option(parser, name, option, field.default)
        if is_payload and issubclass(setup, LinkSetup):
            _add_link(parser, across=setup.across)
            if issubclass(setup, SmallSetup):
                _add_inline(parser)
    if "row" in by_name:
        selection = "compare the rows alone whose name has WORD in it (default: all)"
        parser.group("rows").add_argument("--row", default="", metavar="WORD", help=selection)
    if "environments" in by_name:
        _add_systems(parser)
    if "corrupt" in by_name:
        number = NumberArgument("a whole number", -1)
        parser.add_argument("--corrupt", type=number, default=-1, help=argparse.SUPPRESS)
    about = "write setup, machine and result there as JSON; '-': to standard output, nothing else"
    parser.group("output").add_argument("--json", default="", metavar="FILE", help=about)


def _add_option(parser: Parser, name: str, option: Option, default: Any) -> None:
    details: dict[str, Any] = {"default": default, "help": option.text}
    if option.kind is None:
        details = {"action": "store_true", "help": option.text}
    elif isinstance(option.kind, tuple):
        details["choices"] = option.kind
    else:
        details |= {"type": option.kind, "metavar": option.kind.metavar}
        details["help"] += f" (default: {default:g})" if default else ""
    parser.group(option.group).add_argument(f"--{name.replace('_', '-')}", **details)


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


def _add_link(parser: Parser, *, across: bool) -> None:
    add = parser.group("link").add_argument
    connectors = (
        f"how the two processes are connected: {', '.join(_schemes())} (default: shm); "
        "zmq+tcp without encryption, ucx with trusted_network=1, both on loopback"
    )
    add("--connector", default="shm", choices=_schemes(), metavar="NAME", help=connectors)
    url = "the link's whole URL, with address and options, instead of --connector"
    add("--url", default=argparse.SUPPRESS, type=_link_url, help=url)
    if across:
        served = (
            "the reader is on another host: the address that kvlink-bench serve has printed there; "
            "for --connector zmq+tcp or ucx"
        )
        add("--connect", default=argparse.SUPPRESS, type=connected_url, metavar="URL", help=served)
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


def _add_systems(parser: Parser) -> None:
    about = (
        "Each runs in an interpreter of its own. What it requires is installed there when it is "
        "first measured; a system that cannot be installed or run is a line with the reason."
    )
    add = parser.group("systems", about).add_argument
    systems = f"measure this one, repeated for several: {', '.join(PEERS)} (default: all)"
    add("--peer", action="append", default=[], choices=PEERS, metavar="NAME", help=systems)
    interpreter = "an interpreter that has what the system NAME requires; nothing is installed"
    form = "NAME=PATH"
    add("--python", action="append", default=[], type=_interpreter, metavar=form, help=interpreter)
    folder = "where the environments lie (default: omni_kvlink/peers in the user's cache)"
    add("--environments", default="", metavar="DIR", help=folder)


def _interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"wanted NAME=PATH of {', '.join(PEERS)}, got {text!r}")
    return name, path


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
