"""`kvlink record`: receives payloads of a link, and writes them as they came to a directory."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from omni_kvlink.cli.arguments import SECONDS, examples
from omni_kvlink.cli.process import interruptible, show
from omni_kvlink.errors import FileError
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from omni_kvlink.cli.arguments import Parser

_ABOUT = """receive payloads of a link, and write each as a .safetensors file, byte for byte as it
came, with index.jsonl and digests.txt; a payload that its engine is to receive, too, is put with
readers=2"""


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the parser of the verb."""
    lines = (
        "kvlink record shm://bagel recording --key req-1 --key req-2",
        "kvlink record shm://bagel recording --keys-from keys.txt",
    )
    about = "receive payloads of a link, and write them to a directory"
    parser = commands.add_parser("record", help=about, description=_ABOUT, epilog=examples(*lines))
    parser.set_defaults(perform=_record)
    parser.add_argument("url", metavar="URL", help="the producer's URL; options follow a '?'")
    parser.add_argument("directory", metavar="DIR", help="directory of the new recording")
    keys = parser.add_mutually_exclusive_group()
    help_text = "a request id to receive; may be given several times"
    keys.add_argument("--key", action="append", metavar="KEY", dest="keys", help=help_text)
    help_text = "a file with a request id in each line (default: standard input, as it comes)"
    keys.add_argument("--keys-from", default="-", metavar="FILE", help=help_text)
    help_text = "to wait for the producer, and for each payload (default: 60)"
    parser.add_argument(
        "--timeout", type=SECONDS, default=60.0, metavar=SECONDS.metavar, help=help_text
    )


def _record(arguments: argparse.Namespace) -> int:
    from omni_kvlink import KVLink
    from omni_kvlink.inspection import Recording

    keys = _keys(arguments)
    recording, timeout, wrong = Recording(arguments.directory), arguments.timeout, 0
    with interruptible(), KVLink.connect(arguments.url, timeout=timeout) as consumer:
        for key in keys:
            started = time.monotonic()
            received = consumer.get(key, timeout=timeout)
            try:
                record = recording.add(received.save, "get", started)
            except BaseException:
                received.release_unread()
                raise
            received.release()
            show(record.digest_line())
            if record.wrong:
                wrong += 1
                path = recording.directory / record.file
                show(f"{path} is not as it was committed: kvlink inspect {path}", to_stderr=True)
    return 1 if wrong else 0


def _keys(arguments: argparse.Namespace) -> Iterable[str]:
    if arguments.keys is not None:
        return list(arguments.keys)
    if arguments.keys_from == "-":
        return _lines(sys.stdin)
    path = arguments.keys_from
    with translate_errors(path, "give another --keys-from", FileError), open(path) as file:
        try:
            return list(_lines(file))
        except UnicodeDecodeError:
            raise FileError(f"{path} is no text: give another --keys-from") from None


def _lines(file: TextIO) -> Iterator[str]:
    for line in file:
        if key := line.rstrip("\n"):
            yield key
