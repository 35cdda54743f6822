"""`kvlink diff`: where the payloads of two files differ, by branch, layer and token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from omni_kvlink.cli.arguments import examples
from omni_kvlink.cli.process import show
from omni_kvlink.cli.terminal import folded, progress, width

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.cli.arguments import Parser
    from omni_kvlink.inspection import Comparison

_ABOUT = """show where the payloads of two files differ, by branch, layer and token: a picture, the
first byte, and the largest difference; tensors of unequal sizes are compared where they overlap"""
_LONG = 1 << 29
"""Bytes of a file whose comparison takes more than a second or two."""


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the parser of the verb."""
    example = examples("kvlink diff sent.safetensors received.safetensors")
    about = "show where the payloads of two files differ, by branch, layer and token"
    parser = commands.add_parser("diff", help=about, description=_ABOUT, epilog=example)
    parser.set_defaults(perform=_diff)
    parser.add_argument("a", metavar="A", help="a file as save() and `kvlink record` write it")
    parser.add_argument("b", metavar="B", help="a file with which it is compared")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def _diff(arguments: argparse.Namespace) -> int:
    from omni_kvlink.inspection import Comparison, PayloadFile

    a, b = PayloadFile(arguments.a), PayloadFile(arguments.b)
    is_quiet = a.manifest.nbytes < _LONG
    with progress("tensors", len(a.manifest.tensors), quiet=is_quiet) as step:
        comparison = Comparison(a, b, step)
    if arguments.json:
        show(json.dumps(comparison.to_dict(), indent=2))
    else:
        show("\n".join(_report(comparison)))
    return 0 if comparison.is_equal else 1


def _report(comparison: Comparison) -> list[str]:
    from omni_kvlink.inspection.picture import LEGEND, picture

    lines = [f"A: {comparison.a.path}", f"B: {comparison.b.path}"]
    about = (*comparison.notes, *comparison.complaints)
    lines += [folded(text, indent="  ") for text in about]
    has_picture = False
    for name, differences in comparison.branches.items():
        differing = [difference for difference in differences if not difference.is_equal]
        if not differing:
            lines.append(f"{name}: {len(differences)} tensors, equal")
            continue
        has_picture = True
        lines.append(f"{name}: {len(differing)} of {len(differences)} tensors differ")
        lines += [f"  {line}" for line in picture(differences, width() - 2)]
    if has_picture:
        lines.append(folded(LEGEND))
    first = comparison.first
    texts = [*_notes(comparison), *(first.text() if first else ())]
    return [*lines, *(folded(text, indent="  ") for text in texts)]


def _notes(comparison: Comparison) -> list[str]:
    """The notes of tensors that cannot be compared as a whole, each once."""
    first = comparison.first
    tensors = [
        difference
        for branch in comparison.branches.values()
        for difference in branch
        if difference.note
    ]
    notes = {
        difference.note: difference for difference in reversed(tensors) if difference is not first
    }
    return [f"{difference.a.spec.where()}: {note}" for note, difference in reversed(notes.items())]
