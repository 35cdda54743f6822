"""`kvlink doctor`: says what this machine and this build can do, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.arguments import SECONDS, examples, size
from omni_kvlink.cli.process import interruptible, show

if TYPE_CHECKING:
    import argparse

    from omni_kvlink.cli.arguments import Parser

AREAS = (
    "memory",
    "sockets",
    "copier",
    "gpu",
    "packages",
    "keys",
    "namespaces",
    "configuration",
    "links",
)
"""The areas of a report, in its order."""
_ABOUT = """say what this machine, this container and this build can do, and what is wrong: a line
each, and below what is wrong its cure"""


def add_to(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand's parser."""
    lines = (
        "kvlink doctor --quota 8GB --config deploy.yaml",
        "kvlink doctor --serve zmq+tcp://127.0.0.1:7000",
        "kvlink doctor zmq+tcp://127.0.0.1:7000",
    )
    about = " ".join(_ABOUT.split())
    parser = commands.add_parser("doctor", help=about, description=about, epilog=examples(*lines))
    parser.set_defaults(perform=_examine)
    parser.add_argument("url", metavar="URL", nargs="*", help="a link that is to be used here")
    add = parser.add_argument
    quota_help = "memory of all payloads together, as 8GB or 512MiB (default: the URL's, or 4GiB)"
    add("--quota", metavar="SIZE", type=size, help=quota_help)
    add("--keys", metavar="DIR", default="", help="a directory of key files to examine")
    config_help = "a deploy file, or vLLM's transfer configuration (YAML or JSON), to check"
    add("--config", metavar="FILE", default="", help=config_help)
    only_help = f"examine one area alone ({', '.join(AREAS)}); may be given several times"
    add("--only", metavar="AREA", choices=AREAS, action="append", default=[], help=only_help)
    serve_help = "serve this link for a doctor elsewhere, which measures it; until Ctrl-C"
    add("--serve", metavar="URL", default="", help=serve_help)
    timeout_help = "that a link may take to connect, and each payload (default: %(default)g)"
    add("--timeout", type=SECONDS, default=5.0, metavar="SECONDS", help=timeout_help)
    seconds_help = "of a link's bandwidth, measured; 0 for none (default: %(default)g)"
    add("--seconds", type=SECONDS, default=3.0, metavar="SECONDS", help=seconds_help)
    add("--json", action="store_true", help="print one JSON document instead of the text")
    schema_help = "print the JSON schema of that document, and exit"
    add("--schema", action="store_true", help=schema_help)


def _examine(arguments: argparse.Namespace) -> int:
    from omni_kvlink.doctor.examination import examine
    from omni_kvlink.doctor.report import schema

    if arguments.serve:
        return _serve(arguments.serve)
    if arguments.schema:
        show(_json(schema()))
        return 0
    report = examine(_inquiry(arguments))
    show(report.to_json() if arguments.json else report.text())
    return 0 if report.healthy else 1


def _serve(url: str) -> int:
    from omni_kvlink.doctor.probe_server import serve

    with interruptible():
        serve(url, lambda bound: show(f"serving {bound}; Ctrl-C ends it"))
    return 0


def _inquiry(arguments: argparse.Namespace) -> Any:
    from omni_kvlink.doctor.inquiry import Inquiry
    from omni_kvlink.settings import Size

    return Inquiry(
        urls=tuple(arguments.url),
        quota=Size().read(arguments.quota, "--quota") if arguments.quota else 0,
        keys=arguments.keys,
        config=arguments.config,
        timeout=arguments.timeout,
        seconds=arguments.seconds,
        quiet=arguments.json,
        areas=tuple(arguments.only),
    )


def _json(value: object) -> str:
    import json

    return json.dumps(value, indent=2)
