"""`kvlink trace`: one timeline of what several processes have recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.arguments import directory, examples
from omni_kvlink.cli.process import held, show

if TYPE_CHECKING:
    import argparse

_EXAMPLES = examples("kvlink trace traces -o trace.json")
_ABOUT = """merge what processes recorded with KVLINK_TRACE=DIRECTORY into one timeline, which
https://ui.perfetto.dev and about:tracing open"""


def add_to(commands: Any) -> None:
    """Add the verb's parser."""
    about = "merge the timelines of several processes into one file for ui.perfetto.dev"
    parser = commands.add_parser("trace", help=about, description=_ABOUT, epilog=_EXAMPLES)
    parser.set_defaults(perform=_trace)
    directory_help = "directory that the processes recorded to"
    parser.add_argument("directory", metavar="DIRECTORY", type=directory, help=directory_help)
    output = "the file to write (default: trace.json); it is replaced"
    parser.add_argument("-o", "--output", metavar="FILE", default="trace.json", help=output)


def _trace(arguments: argparse.Namespace) -> int:
    from omni_kvlink.errors import FileError
    from omni_kvlink.telemetry.timeline import Timeline

    timeline, path = Timeline(arguments.directory), arguments.output
    with held():
        try:
            with open(f"{path}.part", "wb") as file:
                file.write(timeline.document())
            os.replace(f"{path}.part", path)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}; name another with --output") from None
    count = sum(event["ph"] == "X" for event in timeline.events)
    lines = [f"{path}: {count} spans of {timeline.processes} processes; open it in ui.perfetto.dev"]
    if timeline.machines > 1:
        about = f"{timeline.machines} machines are aligned by their wall clocks"
        lines.append(f"{about}: what lies between them is right to within what these disagree by")
    if timeline.torn:
        lines.append(f"{timeline.torn} lines are torn: their processes were killed")
    show("\n".join(lines))
    return 0
