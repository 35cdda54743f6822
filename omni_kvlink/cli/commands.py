"""The subcommands of `kvlink`: their arguments, and what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.cli import diff, doctor, inspect, record, replay, store, trace
from omni_kvlink.cli.arguments import Parser, directory, examples
from omni_kvlink.cli.process import held, run_guarded, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run one command line in this process; return the exit status."""
    arguments = parse(argv)
    return run_guarded("kvlink", lambda: perform(arguments))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; SystemExit for wrong usage, `--help` and `--version`."""
    return make_parser().parse_args(argv)


def perform(arguments: argparse.Namespace) -> int:
    """Do what a command line says; return the exit status."""
    return int(arguments.perform(arguments))


def make_parser() -> Parser:
    """The parser of all subcommands."""
    lines = ("kvlink keygen keys producer", "kvlink check-checkpoint models/BAGEL-7B-MoT")
    parser = Parser(
        prog="kvlink", description="tools for the users of links", epilog=examples(*lines)
    )
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    about = "make the two key files of one side of an encrypted link"
    keygen = commands.add_parser("keygen", help=about, description=about, epilog=_KEYGEN)
    keygen.set_defaults(perform=_keygen)
    directory_help = "directory of the key files; it is created if there is none"
    keygen.add_argument("directory", metavar="DIRECTORY", help=directory_help)
    name = "name of this side: the files are NAME.secret and NAME.public, and none is overwritten"
    keygen.add_argument("name", metavar="NAME", help=name)
    about = "compare the files of a BAGEL checkpoint with its configuration; reads headers alone"
    check = commands.add_parser(
        "check-checkpoint", help=about, description=about, epilog=examples(lines[1])
    )
    check.set_defaults(perform=_check_checkpoint)
    directory_help = "directory of the checkpoint, with its configuration, tokenizer and weights"
    check.add_argument("directory", metavar="DIRECTORY", type=directory, help=directory_help)
    for verb in (doctor, inspect, diff, record, replay, store, trace):
        verb.add_to(commands)
    return parser


_KEYGEN = examples("kvlink keygen keys producer", "kvlink keygen keys reader")


def _keygen(arguments: argparse.Namespace) -> int:
    from omni_kvlink.connectors.control.keys import generate

    with held():
        secret, public = generate(arguments.directory, arguments.name)
        show(f"{secret}: stays here; keys= of this side\n{public}: for the other side's peers=")
    return 0


def _check_checkpoint(arguments: argparse.Namespace) -> int:
    from omni_kvlink.models.bagel import check_checkpoint

    report = check_checkpoint(arguments.directory)
    lines = [*report.errors, *(f"{line}: nothing reads it" for line in report.unread)]
    if report.errors:
        count = len(report.errors)
        lines.append(f"{arguments.directory} cannot be loaded: {count} error{'s' * (count > 1)}")
    else:
        lines.append(f"{report.tensors} tensors, {report.nbytes / 1e9:.1f} GB: complete")
    show("\n".join(lines))
    return 1 if report.errors else 0
