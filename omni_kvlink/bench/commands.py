"""The subcommands of `kvlink-bench`: each measures, prints its report and writes its document."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from omni_kvlink.bench import report
from omni_kvlink.bench.options import RENAMED, make_parser
from omni_kvlink.bench.setups import COMMANDS, PRESETS
from omni_kvlink.cli.process import held, interruptible, run_guarded, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

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
    """Measure, print the report, and write the document; return the exit status."""
    is_quiet = arguments.json == "-"
    setup = _setup(COMMANDS[arguments.command], vars(arguments))
    report.check_json(arguments.json)
    module = import_module(f"omni_kvlink.bench.{setup.module}")
    machine = import_module("omni_kvlink.bench.machine")
    with interruptible():
        result = module.measure(setup, partial(report.progress, quiet=is_quiet))
    description = machine.describe()
    if not is_quiet:
        about = report.wrapped("machine", machine.one_line(description))
        show("\n".join((f"kvlink-bench {arguments.command}", about, result.text())))
        report.draw(*result.drawn)
    if arguments.json:
        parts = (dataclasses.asdict(setup), result.to_dict())
        with held():
            report.write_json(arguments.json, arguments.command, description, *parts)
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
    if "url" in values:
        values["connector"] = values["url"].partition("://")[0]
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in fields if name in values})
