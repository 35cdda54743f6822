"""`kvlink replay`: serves the payloads of a recording again, at the times of the recording."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, TextIO

from omni_kvlink.cli.arguments import POSITIVE, NumberArgument, examples
from omni_kvlink.cli.process import interruptible, show
from omni_kvlink.errors import FileError
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.cli.arguments import Parser

_ABOUT = """serve the payloads of a recording again under their keys, byte for byte, and print their
digests in the form of the recording's digests.txt; exit status 1 if a payload was not received"""


class SpeedArgument(NumberArgument):
    """The type of a speed: a number, or max."""

    def __call__(self, text: str) -> float:
        """The speed that a text says; infinity for max."""
        return math.inf if text == "max" else float(super().__call__(text))


_SPEED = SpeedArgument("max or a number", 0.001, 1_000_000, float)
_TTL = NumberArgument("a number of seconds", 0.001, 86_400, float, metavar="SECONDS")


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the parser of the verb."""
    lines = (
        "kvlink replay recording shm://bagel",
        "kvlink replay recording zmq+tcp://127.0.0.1:5555 --speed max",
    )
    about = "serve the payloads of a recording again"
    parser = commands.add_parser("replay", help=about, description=_ABOUT, epilog=examples(*lines))
    parser.set_defaults(perform=_replay)
    parser.add_argument("directory", metavar="DIR", help="directory of the recording")
    parser.add_argument("url", metavar="URL", help="where to serve; options follow a '?'")
    help_text = "times as fast as recorded; max waits for nothing (default: 1)"
    parser.add_argument("--speed", type=_SPEED, default=1.0, metavar="N|max", help=help_text)
    help_text = "number of readers of each payload (default: 1)"
    parser.add_argument("--readers", type=POSITIVE, default=1, metavar="N", help=help_text)
    help_text = "in which the readers of a payload must come (default: 60)"
    parser.add_argument("--ttl", type=_TTL, default=60.0, metavar=_TTL.metavar, help=help_text)
    help_text = "write the list of digests to this file, too"
    parser.add_argument("--digests", metavar="FILE", help=help_text)


def _replay(arguments: argparse.Namespace) -> int:
    from omni_kvlink import KVLink
    from omni_kvlink.inspection import Replay, read_recording

    records = read_recording(arguments.directory)
    with contextlib.ExitStack() as stack:
        listed = None
        if arguments.digests is not None:
            listed = stack.enter_context(_open(arguments.digests))
        stack.enter_context(interruptible())
        producer = stack.enter_context(KVLink.serve(arguments.url))
        options = {"speed": arguments.speed, "ttl": arguments.ttl}
        replay = Replay(
            arguments.directory, records, producer, readers=arguments.readers, **options
        )
        show(f"{len(records)} payloads at {producer.url}", to_stderr=True)
        for record in replay.put_all():
            show(record.digest_line())
            if listed is not None:
                with _as_file_errors(arguments.digests):
                    print(record.digest_line(), file=listed, flush=True)
        replay.await_readers()
    for key, reason in replay.lost.items():
        show(f"{key!r} was not received: {reason}", to_stderr=True)
    return 1 if replay.lost else 0


def _open(path: str) -> TextIO:
    with _as_file_errors(path):
        return open(path, "w")


def _as_file_errors(path: str) -> contextlib.AbstractContextManager[None]:
    return translate_errors(f"--digests {path}", "give another file", FileError)
