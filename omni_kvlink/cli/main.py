"""`kvlink`: tools for the users of links."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (KVLinkError, ValueError, OSError) as error:
        kind = f"{type(error).__name__}: " if isinstance(error, KVLinkError) else ""
        print(f"kvlink: {kind}{error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    epilog = "exit status: 0 done, 2 wrong usage or an error"
    parser = argparse.ArgumentParser(
        prog="kvlink", description=__doc__, epilog=epilog, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "make the two key files of one side of an encrypted link"
    keygen = commands.add_parser("keygen", help=about, description=about)
    keygen.set_defaults(run=_keygen)
    keygen.add_argument("directory", help="where to write them")
    keygen.add_argument("name", help="of the two files: NAME.secret and NAME.public")
    about = "compare the files of a BAGEL checkpoint with its configuration; reads headers alone"
    check = commands.add_parser("check-checkpoint", help=about, description=about)
    check.set_defaults(run=_check_checkpoint)
    check.add_argument("directory", help="of the checkpoint")
    return parser


def _check_checkpoint(arguments: argparse.Namespace) -> None:
    from omni_kvlink.models.bagel import CheckpointError, check_checkpoint

    report = check_checkpoint(arguments.directory)
    for line in report.errors:
        print(line)
    for line in report.unread:
        print(f"{line}: nothing reads it")
    if report.errors:
        raise CheckpointError(
            f"{arguments.directory} cannot be loaded: {len(report.errors)} errors"
        )
    print(f"{report.tensors} tensors, {report.nbytes / 1e9:.1f} GB: complete")


def _keygen(arguments: argparse.Namespace) -> None:
    secret, public = generate(arguments.directory, arguments.name)
    print(f"{secret}: stays here; keys= of this side\n{public}: for the other side's peers=")
