"""The documentation names every public error, every public name, and the figures of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import omni_kvlink
from omni_kvlink import errors
from omni_kvlink.connectors import base
from omni_kvlink.connectors.control import monitored_socket, refusals
from omni_kvlink.connectors.protocol import fetch_plan, tombstones, transfer_table, waiting_gets
from omni_kvlink.connectors.runtime import consumer
from omni_kvlink.connectors.shm.channel import MAX_BACKLOG
from omni_kvlink.connectors.shm.listener import MAX_PEERS
from omni_kvlink.memory import arena
from omni_kvlink.memory.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = Path(omni_kvlink.__file__).parent
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="installed without the sources")


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def test_every_error_has_a_section() -> None:
    headings = set(re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE))
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KVLinkError)
    }
    assert headings == public - {"KVLinkError"}


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(found.read_text() for found in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"omni_kvlink\.(\w+)$", pages, re.MULTILINE))
    source = Path(omni_kvlink.__file__).read_text()
    exported = set(re.findall(r"^ *from .* import \w+ as ([A-Za-z]\w*)$", source, re.MULTILINE))
    assert {"KVLink", "KVLinkError"} < exported
    on_the_error_page = {name for name in exported if hasattr(errors, name)}
    assert exported - on_the_error_page - documented == set()
    modules = {"adapters", "aio", "engine", "errors", "lowlevel", "lookup", "testing", "topology"}
    assert modules <= documented


def test_operations_names_every_environment_variable() -> None:
    read = set()
    for path in (*PACKAGE.rglob("*.py"), PACKAGE.parent / "setup.py"):
        read |= set(re.findall(r"[\"'](OMNI_KVLINK_\w+)[\"']", path.read_text()))
    assert read
    named = set(re.findall(r"^\| `(OMNI_KVLINK_\w+)`", (DOCS / "operations.md").read_text(), re.M))
    assert named == read


def counters() -> Iterator[str]:
    """Keys of `stats()` that are made at one place of the code."""
    yield from transfer_table.TransferTable(lambda peer, message: None, lambda one: None).stats()
    yield from arena.ArenaPool(Mapping.anonymous, 0).stats()


def test_operations_explains_every_counter() -> None:
    rows = " ".join(re.findall(r"^\|.*$", (DOCS / "operations.md").read_text(), re.MULTILINE))
    for name in counters():
        assert re.search(rf"`(transfers\.|memory\.)?{name}`", rows), name


def included() -> list[tuple[Path, Path, str]]:
    """Page, file and object of each {literalinclude} that shows one object of a file."""
    found = re.compile(r"{literalinclude} (\S+)\n(?::\w+: .*\n)*?:pyobject: (\S+)")
    return [
        (path, path.parent / file, name)
        for path in sorted(DOCS.rglob("*.md"))
        for file, name in found.findall(path.read_text())
    ]


def test_what_a_page_shows_of_a_file_is_there() -> None:
    assert len(included()) > 10
    for path, file, name in included():
        found = ast.parse(file.read_text()).body
        for part in name.split("."):
            made = [one for one in found if getattr(one, "name", "") == part]
            assert len(made) == 1, (path.name, file.name, name)
            found = getattr(made[0], "body", [])


COUNTED = re.compile(
    r"""(?:_count(?:\(|, )|[._]refused\[|\.refuse\(peer, [^\n]*, |\._refuse\([^\n]*, )"([\w ]+)\""""
)


def test_zmq_names_every_reason_of_a_refusal() -> None:
    folders = (PACKAGE / "connectors" / name for name in ("control", "runtime"))
    sources = (path for folder in folders for path in folder.glob("*.py"))
    counted = {reason for path in sources for reason in COUNTED.findall(path.read_text())}
    named = set(re.findall(r"^\| `([\w ]+)` \|", (DOCS / "zmq.md").read_text(), re.MULTILINE))
    assert counted == named


def test_the_figures_of_the_pages_are_those_of_the_code() -> None:
    operations, protocol = page("operations.md"), page("protocol.md")
    for text, figure in (
        (operations, f"at most {refusals.MAX_PEERS:,} consumers"),
        (operations, f"every {monitored_socket.HEARTBEAT_MS / 1000:g} s;"),
        (operations, f"after {monitored_socket.HEARTBEAT_TIMEOUT_MS / 1000:g} s without"),
        (operations, f"TCP connection | {monitored_socket.HANDSHAKE_MS / 1000:g} s |"),
        (operations, f"TCP is tried every {monitored_socket.RECONNECT_MS} ms"),
        # The figure of the page; it is no setting.
        (operations, f"tried again for {consumer._RECONNECT_SECONDS:g} s"),
        (operations, f"at most {base.MAX_RETRIES} times within one `get`"),
        (operations, f"reason | {tombstones.TOMBSTONE_SECONDS / 60:g} minutes"),
        (operations, f"unless {MAX_BACKLOG:,} messages wait"),
        (operations, f"{base.Options().quota >> 30} GiB by default"),
        (operations, f"arenas of {arena.MIN_ARENA >> 20} MiB"),
        (protocol, f"for {tombstones.TOMBSTONE_SECONDS:g} seconds"),
        (protocol, f"At most {tombstones.MAX_TOMBSTONES:,} such keys"),
        (protocol, f"last {tombstones.MAX_TOMBSTONES:,} such keys"),
        (protocol, f"At most {waiting_gets.MAX_WAITING:,} gets"),
        (protocol, f"at most {fetch_plan.EAGER:,} bytes"),
        (protocol, f"`Chunk`s of at most {fetch_plan.CHUNK >> 20} MiB"),
        (protocol, f"{fetch_plan.WINDOW >> 20} MiB at most"),
        (protocol, f"multiple of {arena.GRAIN:,}"),
        (protocol, f"consumers of a listener | {MAX_PEERS:,}"),
    ):
        assert figure in text, figure


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((DOCS.parent / "README.md").read_text().split()) <= 1000
