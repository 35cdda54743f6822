"""Captured packets show nothing of an encrypted link, and everything of an open one."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import zmq.utils.z85

from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import sized
from support.network.hosts import HAS_UCX, Hosts

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from support.connectors.key_files import KeyFiles
    from support.network.cable import Cable

REQUEST = "request-of-somebody"
PAYLOAD = sized(REQUEST, 2 << 20, seed=77)
WORDS = (REQUEST.encode(), b"kv_lens", b"Offer", b"FetchRange")
"""Bytes that occur in headers and messages."""
SAMPLE = 24


@contextlib.contextmanager
def captured(cable: Cable) -> Iterator[bytearray]:
    """Capture all frames meanwhile."""
    captured_bytes, over = bytearray(), threading.Event()

    def listen(tap: socket.socket) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                captured_bytes.extend(tap.recv(1 << 17))

    with cable.open_tap() as tap:
        tap.settimeout(0.1)
        thread = threading.Thread(target=listen, args=(tap,))
        thread.start()
        try:
            yield captured_bytes
        finally:
            over.set()
            thread.join()


def capture_transfer(hosts: Hosts, scheme: str, *, encrypted: bool) -> bytes:
    with captured(hosts.cable) as captured_bytes:
        pair = hosts.join(scheme, encrypted=encrypted)
        pair.put(PAYLOAD)
        assert pair.get(PAYLOAD).arrived()
        pair.close()
    assert len(captured_bytes) > 2 << 20, "not everything was captured"
    return bytes(captured_bytes)


def share_captured(captured_bytes: bytes) -> float:
    """Return the fraction of the payload's samples that were captured."""
    [first, *_] = PAYLOAD.make().tensors()
    raw = dense(first).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    samples = [raw[at : at + SAMPLE] for at in range(0, len(raw) - SAMPLE, len(raw) // 300)]
    return sum(sample in captured_bytes for sample in samples) / len(samples)


def secrets(key_files: KeyFiles) -> list[bytes]:
    """Return every secret key, as text and as bytes."""
    texts = [
        Path(key_files.key(f"{name}.secret")).read_bytes().strip()
        for name in ("producer", "reader")
    ]
    return [*texts, *map(zmq.utils.z85.decode, texts)]


def test_nothing_of_an_encrypted_link_is_readable(hosts: Hosts) -> None:
    captured_bytes = capture_transfer(hosts, "zmq+tcp", encrypted=True)
    assert b"CURVE" in captured_bytes, "another connection was captured"
    assert share_captured(captured_bytes) == 0
    assert [word for word in (*WORDS, *secrets(hosts.key_files)) if word in captured_bytes] == []


def test_an_open_link_is_readable(hosts: Hosts) -> None:
    """Proves that the search finds what was captured."""
    captured_bytes = capture_transfer(hosts, "zmq+tcp", encrypted=False)
    assert share_captured(captured_bytes) > 0.9
    assert [word for word in WORDS if word not in captured_bytes] == []


@pytest.mark.skipif(not HAS_UCX, reason="pip install 'omni-kvlink[ucx]'")
def test_payloads_over_ucx_are_readable_and_keys_are_not(hosts: Hosts) -> None:
    """As docs/ucx.md says: keys protect the messages, not the payloads that UCX sends."""
    captured_bytes = capture_transfer(hosts, "ucx", encrypted=True)
    assert share_captured(captured_bytes) > 0.9
    assert [
        word
        for word in (b"Offer", b"FetchRange", *secrets(hosts.key_files))
        if word in captured_bytes
    ] == []
