"""Examines links: connects, and measures what a peer that runs `kvlink doctor --serve` sends."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import TYPE_CHECKING

from omni_kvlink import KVLink, TransferTimeout, VersionError
from omni_kvlink._version import __version__
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.runtime.user_files import default_directory
from omni_kvlink.doctor.bandwidth import Bandwidth
from omni_kvlink.doctor.inquiry import LinkAddress
from omni_kvlink.doctor.peer_identity import PeerIdentity
from omni_kvlink.doctor.probe_server import SMALL
from omni_kvlink.errors import KVLinkError, SchemaError

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer
    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry

ROUND_TRIPS = 200
_WAIT = 2.0
"""Seconds in which a doctor that serves there must have answered."""
_SERVE = "run `kvlink doctor --serve URL` there to measure it"
_OF_TCP = ("auto", "zmq+tcp", "ucx")


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings of each URL; blocks for the timeout and the seconds of each."""
    for url in inquiry.urls:
        try:
            link = LinkAddress.read(url)
        except SchemaError as error:
            area.failed("url", error, "correct the URL, or the option in it")
            continue
        area.ok("url", url)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always", RuntimeWarning)
            _probe(area, inquiry, link)
        for text in dict.fromkeys(str(one.message) for one in raised):
            area.note("warning", text)


def _probe(area: Area, inquiry: Inquiry, link: LinkAddress) -> None:
    directory = link.options.directory or default_directory()
    if link.scheme == "shm" and not os.path.isdir(directory):  # to connect would make it
        area.wrong("connection", f"nobody serves: there is no {directory}", _cure(link, inquiry))
        return
    started = time.monotonic()
    try:
        consumer = KVLink.connect(link.url, timeout=inquiry.timeout)
    except VersionError as error:
        cure = f"install one release of omni-kvlink on both sides; here it is {__version__}"
        area.failed("protocol", error, cure)
    except TransferTimeout as error:
        text, _, own_cure = str(error).partition("; start the producer")
        if own_cure:  # there may be more causes than the error names
            area.wrong("connection", text, _cure(link, inquiry))
        else:
            area.failed("connection", error)
    except KVLinkError as error:
        area.failed("connection", error)
    else:
        with consumer:
            milliseconds = 1e3 * (time.monotonic() - started)
            area.ok("connection", f"opened in {milliseconds:.0f} ms")
            _producer(area, consumer)
            with area.guarded("payloads"):
                _payloads(area, inquiry, link, consumer)


def _cure(link: LinkAddress, inquiry: Inquiry) -> str:
    """Return what to check where nobody answers."""
    if link.scheme == "shm":
        return (
            f"start the producer as uid {os.geteuid()}, with the same XDG_RUNTIME_DIR or "
            "directory=; containers must share that directory"
        )
    if link.scheme == "zmq+ipc":
        return f"start the producer; containers must share {os.path.dirname(link.address)}"
    location = link.options.tcp if link.scheme == "auto" else link.address
    if link.scheme in _OF_TCP and ControlAddress("tcp", location).is_local:
        network = inquiry.root.link("proc/self/ns/net")
        return (
            f"start the producer; loopback is of this network namespace ({network}) alone: compare "
            "`readlink /proc/PID/ns/net` of both, share it (--network=host), or serve an address "
            "that both reach"
        )
    return "start the producer; check the address, its port (`ss -ltn` there) and firewalls"


def _producer(area: Area, consumer: KVConsumer) -> None:
    """Say which process answers, and over what; every producer has that."""
    stats = consumer.stats()
    pid = f", pid {stats['pid']}" if "pid" in stats else ""
    area.ok("producer", f"incarnation {stats['incarnation']}{pid}")
    if "transport" in stats:
        area.ok("path", f"{stats['transport']}: {' '.join(stats['why'].split())}")


def _payloads(area: Area, inquiry: Inquiry, link: LinkAddress, consumer: KVConsumer) -> None:
    try:
        with consumer.get(SMALL, timeout=min(_WAIT, inquiry.timeout)) as data:
            peer = PeerIdentity.read(data)
    except TransferTimeout:
        area.note("payloads", f"no doctor serves there: {_SERVE}")
        return
    area.ok("peer", str(peer))
    if peer.release != __version__:
        area.note("release", f"{peer.release} there, {__version__} here: the protocol is the same")
    _path(area, link, peer)
    microseconds = round_trip(consumer, inquiry.timeout) * 1e6
    area.ok("round trip", f"{microseconds:.0f} µs, the median of {ROUND_TRIPS} small payloads")
    if inquiry.seconds:
        figures = Bandwidth.measure(consumer, inquiry)
        area.ok("bandwidth", str(figures))


def _path(area: Area, link: LinkAddress, peer: PeerIdentity) -> None:
    """Say which connector the URL names, and whether a nearer one would do; `auto` has said it."""
    if link.scheme == "auto":
        return
    own = PeerIdentity.of_process()
    is_near = bool(own.boot_id) and own.boot_id == peer.boot_id
    if link.scheme in ("zmq+tcp", "ucx", "zmq+ipc") and is_near:
        nearer = "auto:// would take shared memory, if both see one socket directory"
        area.note("path", f"{link.scheme}, as the URL says; both ends share a kernel: {nearer}")
    else:
        area.ok("path", f"{link.scheme}, as the URL says")


def round_trip(consumer: KVConsumer, timeout: float) -> float:
    """The median of the seconds from a get to its payload, which is offered already."""
    seconds = list[float]()
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        received = consumer.get(SMALL, timeout=timeout)
        seconds.append(time.perf_counter() - started)
        received.release()
    return statistics.median(seconds)
