"""What somebody on the cable hears: nothing of an encrypted link, everything of an open one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq.utils.z85
from cable import Cable
from hosts import HAS_UCX, Hosts
from key_fixtures import Safe

from omni_kvlink.payload.views import dense
from omni_kvlink.testing.memory_checks import sized

REQUEST = "request-of-somebody"
PAYLOAD = sized(REQUEST, 2 << 20, seed=77)
WORDS = (REQUEST.encode(), b"kv_lens", b"Offer", b"Fetch")
"""What headers and messages are full of."""
SAMPLE = 24


@contextlib.contextmanager
def captured(cable: Cable) -> Iterator[bytearray]:
    """All that crosses the cable meanwhile."""
    heard, over = bytearray(), threading.Event()

    def listen(tap: socket.socket) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                heard.extend(tap.recv(1 << 17))

    with cable.tap() as tap:
        tap.settimeout(0.1)
        thread = threading.Thread(target=listen, args=(tap,))
        thread.start()
        try:
            yield heard
        finally:
            over.set()
            thread.join()


def overhear(hosts: Hosts, scheme: str, *, encrypted: bool) -> bytes:
    with captured(hosts.cable) as heard:
        pair = hosts.join(scheme, encrypted=encrypted)
        pair.put(PAYLOAD)
        assert pair.get(PAYLOAD).arrived()
        pair.close()
    assert len(heard) > 2 << 20, "not all was heard"
    return bytes(heard)


def seen(heard: bytes) -> float:
    """The share of the payload's bytes, by samples, that were heard."""
    [first, *_] = PAYLOAD.make().tensors()
    raw = dense(first).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    samples = [raw[at : at + SAMPLE] for at in range(0, len(raw) - SAMPLE, len(raw) // 300)]
    return sum(sample in heard for sample in samples) / len(samples)


def secrets(safe: Safe) -> list[bytes]:
    """Every secret key, as text and as bytes."""
    texts = [Path(safe.key(f"{who}.secret")).read_bytes().strip() for who in ("producer", "reader")]
    return [*texts, *map(zmq.utils.z85.decode, texts)]


def test_an_encrypted_link_tells_nothing(hosts: Hosts) -> None:
    heard = overhear(hosts, "zmq+tcp", encrypted=True)
    assert b"CURVE" in heard, "this is another conversation"
    assert seen(heard) == 0
    assert [word for word in (*WORDS, *secrets(hosts.safe)) if word in heard] == []


def test_an_open_link_tells_all(hosts: Hosts) -> None:
    """So the same search does find what is there to be found."""
    heard = overhear(hosts, "zmq+tcp", encrypted=False)
    assert seen(heard) > 0.9
    assert [word for word in WORDS if word not in heard] == []


@pytest.mark.skipif(not HAS_UCX, reason="pip install 'omni-kvlink[ucx]'")
def test_ucx_tells_payloads_and_no_keys(hosts: Hosts) -> None:
    """As its page says: keys protect what is said, not the bytes that UCX carries."""
    heard = overhear(hosts, "ucx", encrypted=True)
    assert seen(heard) > 0.9
    assert [word for word in (b"Offer", b"Fetch", *secrets(hosts.safe)) if word in heard] == []
