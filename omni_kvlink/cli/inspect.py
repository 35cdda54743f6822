"""`kvlink inspect`: what a payload's file holds, and whether its bytes are the committed ones.

Of a URL: what the live producer there keeps.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import TYPE_CHECKING

from omni_kvlink.cli.arguments import SECONDS, examples
from omni_kvlink.cli.inspect_url import inspect_url
from omni_kvlink.cli.process import show
from omni_kvlink.cli.terminal import folded, progress, table
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.cli.arguments import Parser
    from omni_kvlink.inspection import ChunkFault, PayloadFile
    from omni_kvlink.payload.branches import Branch

_ABOUT = """show what a payload's .safetensors file holds, and check its digests; or what a live
producer keeps"""
_LONG_ABOUT = """show what a payload's .safetensors file holds, and check its digests; or, of a
live producer's URL, the keys, states, readers, ages and memory of the payloads that it keeps. The
latter is for the producer's owner: run it as the producer's user or as root; over TCP with keys=,
with the producer's own key. It receives and changes no payload."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LONG = 1 << 30
"""Bytes of a file whose digests take more than a second or two."""
_HEAD = ("branch", "layers", "shape", "layout", "dtype", "bytes", "kv_lens", "ropes")


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the parser of the verb."""
    lines = (
        "kvlink inspect req-1.safetensors",
        "kvlink inspect bad.safetensors --against good.safetensors",
        "kvlink inspect shm://bagel --prefix req-",
        "kvlink inspect 'zmq+tcp://10.0.0.1:7000?keys=own.secret&peers=own.public'",
    )
    about = _LONG_ABOUT
    parser = commands.add_parser("inspect", help=_ABOUT, description=about, epilog=examples(*lines))
    parser.set_defaults(perform=_inspect)
    parser.add_argument(
        "target",
        metavar="FILE|URL",
        help="a file as save() and `kvlink record` write it; or a producer's URL",
    )
    against = "a file with the right bytes, to name each byte that differs where a digest is wrong"
    parser.add_argument("--against", metavar="OTHER", help=against)
    help_text = "of a URL: only payloads whose key begins so"
    parser.add_argument("--prefix", default="", metavar="KEY", help=help_text)
    help_text = "of a URL: to wait for the producer, and for its answer (default: 5)"
    parser.add_argument(
        "--timeout", type=SECONDS, default=5.0, metavar=SECONDS.metavar, help=help_text
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def _inspect(arguments: argparse.Namespace) -> int:
    if _URL.match(arguments.target):
        return inspect_url(arguments)
    if arguments.prefix:
        raise SchemaError("--prefix: of a producer's URL only, and this is a file")

    from omni_kvlink.inspection import PayloadFile, faults_of

    file = PayloadFile(arguments.target)
    other = None if arguments.against is None else PayloadFile(arguments.against)
    tensors = file.manifest.tensors
    faults: list[ChunkFault] = []
    with progress("tensors", len(tensors), quiet=file.manifest.nbytes < _LONG) as step:
        for spec in tensors:
            faults += faults_of(file, spec)
            step()
    if arguments.json:
        document = {**file.to_dict(), "faults": [fault.to_dict(other) for fault in faults]}
        show(json.dumps(document, indent=2))
    else:
        show("\n".join([*_summary(file), *_faults(file, faults, other)]))
    return 1 if faults else 0


def _summary(file: PayloadFile) -> list[str]:
    manifest = file.manifest
    producer = manifest.producer
    lines = [
        f"{file.path}: {manifest.kind} {manifest.request_id!r}, {manifest.nbytes:,} bytes, "
        f"{manifest.header_nbytes:,} of them header",
        f"format {file.version}, written by omni_kvlink {producer.get('library', '?')} "
        f"on {producer.get('host', '?')}",
    ]
    rows = [_row(file, branch) for branch in manifest.branches]
    return [*map(folded, lines), table(_HEAD, rows)]


def _row(file: PayloadFile, branch: Branch) -> list[str]:
    nbytes = f"{file.nbytes_of(branch):,}"
    if branch.tree is not None:
        count = len(file.manifest.tensors_of(branch))
        return [branch.name, "-", f"{count} tensors", "-", "-", nbytes, "-", "-"]
    shape = str(list(branch.shape))
    if branch.reuse is not None:
        tokens = branch.reuse.tokens
        shape = f"all of {branch.reuse.of}" if tokens is None else f"{tokens} of {branch.reuse.of}"
    return [
        *(branch.name, str(branch.num_layers), shape, branch.layout, branch.dtype or "-", nbytes),
        *(reprlib.repr(list(numbers)) for numbers in (branch.kv_lens, branch.ropes)),
    ]


def _faults(file: PayloadFile, faults: list[ChunkFault], other: PayloadFile | None) -> list[str]:
    tensors = file.manifest.tensors
    chunks = sum(len(spec.digest) // 8 for spec in tensors)
    if not file.manifest.is_covered:
        return ["it was put without digests: no byte of its tensors can be checked"]
    if not faults:
        return [f"{len(tensors)} tensors, {chunks} digests: every byte is as it was committed"]
    lines = [f"WRONG: {len(faults)} of {chunks} digests"]
    for fault in faults:
        first, *notes = fault.text()
        notes += [] if other is None else [fault.text_against(other)]
        lines.append(folded(first, indent="  "))
        lines += [folded(text, "  ", "    ") for text in notes]
    return lines
