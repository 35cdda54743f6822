from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_kvlink import KVCacheBundle, VersionError, WireError
from omni_kvlink.payload.format import MAX_HEADER
from omni_kvlink.payload.manifest import Manifest
from support.payloads import broken_headers, headers, strategies
from support.payloads.broken_headers import CASES
from support.payloads.random_caches import written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SECONDS = 0.05
MOST_REFERENCES = 8
"""As long as `MOST_SECONDS` on a quiet machine, where the reference takes 6 ms."""
REFERENCE = json.dumps(
    [{"shape": [number, 1], "digest": f"{number:08x}"} for number in range(4096)]
)
MOST_BYTES = 16 << 20


def test_the_cases_have_names_of_their_own() -> None:
    assert len({name for name, _, _ in CASES}) == len(CASES) > 45


@pytest.mark.parametrize(
    ("pattern", "make"), [pytest.param(*rest, id=name) for name, *rest in CASES]
)
def test_it_is_refused_at_once(pattern: str, make: Callable[[], bytes]) -> None:
    payload = make()
    times, references = [], []
    for _ in range(5):
        start = time.thread_time()
        with pytest.raises(WireError, match=pattern) as caught:
            Manifest.decode(payload)
        times.append(time.thread_time() - start)
        if times[-1] < MOST_SECONDS:
            break
        start = time.thread_time()  # the machine is busy, or the header takes too long
        for one in json.loads(REFERENCE):
            bytes.fromhex(one["digest"])
            str(one["shape"])
        references.append(time.thread_time() - start)
    assert min(times) < max(MOST_SECONDS, MOST_REFERENCES * min(references, default=0.0))
    assert len(str(caught.value)) < 1000
    assert isinstance(caught.value, VersionError) is ("payload version" in str(caught.value))


def test_it_takes_little_memory() -> None:
    """In a fresh process, each case in a child of its own."""
    tests, package = Path(__file__).parents[1], Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, broken_headers.__file__],
        env={**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{tests}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= {"wide producer", "escaped lists", "70,000 tensors", "rank 10^6"}
    assert {name: cost for name, cost in found.items() if max(cost) > MOST_BYTES} == {}


def test_depth_beside_the_parsers_own_limit() -> None:
    """Decoding and encoding again recurse to different depths; neither may show."""
    for depth in range(900, 1010):
        nest = "[" * depth + "]" * depth
        for key in ('"dtype"', '"kvlink"'):
            text = headers.text().decode().replace(key, f'"x":{nest},{key}', 1)
            _refused_or_the_same(headers.sealed(text.encode()))
        with pytest.raises(WireError):
            Manifest.decode(broken_headers.extra(nest))


def _refused_or_the_same(payload: bytes) -> None:
    try:
        found = Manifest.decode(payload)
    except WireError:
        return
    assert content(found) == content(Manifest.decode(headers.payload()))


def content(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, header_nbytes=0, nbytes=0)


PIECES = [
    *(bytes([byte]) for byte in b'{}[],:"\\0123456789-+.eEn \n\t\x00\x7f\x80\xff'),
    *(b"null", b"true", b"1e999", b"9" * 30, b"[]", b"{}", b'""', b"\\u0061", b"\xf0\x9f\x98\x80"),
    *(b'"kv.0.key"', b'"__metadata__":', b'\\"version\\":[1,0]', b"00000000", b'"pad.0":'),
]


def mutated(chance: random.Random, valid: bytes) -> bytes:
    """A few pieces of the text cut out, doubled, swapped in or overwritten."""
    text = bytearray(valid)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(text)), chance.choice((0, 1, 1, 2, 8, 40))
        new = chance.choice((b"", chance.choice(PIECES), bytes(text[at : at + length]) * 2))
        text[at : at + length] = new
    return bytes(text)


@pytest.mark.parametrize("seal", [True, False])
def test_random_mutations_are_refused_or_change_nothing(seal: bool) -> None:
    """With the digest right again (so that the checks behind it are reached) and without."""
    chance = random.Random(20_240 + seal)
    valid, plain = headers.text(), content(Manifest.decode(headers.payload()))
    accepted = 0
    for _ in range(2000):
        text = mutated(chance, valid)
        payload = headers.sealed(text) if seal else framed_as_it_is(text)
        try:
            found = Manifest.decode(payload)
        except WireError:
            continue
        accepted += 1
        if seal:  # a valid digest permits any valid manifest
            again = Manifest.decode(found.encode() + bytes(found.nbytes - found.header_nbytes))
            assert content(again) == content(found)
        else:
            assert content(found) == plain
    assert accepted < 400


def framed_as_it_is(text: bytes) -> bytes:
    """The right header's digest in a text that is not the right one's any more."""
    right = headers.payload()
    digest = headers.QUOTED_BLANK[:-10] + right.split(headers.QUOTED_BLANK[:-10])[1][:8] + b'\\"'
    text = text.replace(headers.QUOTED_BLANK, digest, 1)
    text += b" " * (-(len(text) + 8) % headers.ALIGN)
    return len(text).to_bytes(8, "little") + text + bytes(3 * 256 + 96)


@settings(max_examples=EXAMPLES * 300, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 600))
def test_random_bytes_are_refused(noise: bytes, length: int) -> None:
    for payload in (noise, length.to_bytes(8, "little") + noise):
        with pytest.raises(WireError):
            Manifest.decode(payload)


@settings(max_examples=EXAMPLES * 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.bundles(), st.data())
def test_a_changed_header_never_gives_another_manifest(
    bundle: KVCacheBundle, data: st.DataObject
) -> None:
    manifest, mapping = written(bundle)
    payload = bytearray(mapping.region.view())
    at = data.draw(st.integers(0, manifest.header_nbytes - 4))
    burst = data.draw(st.binary(min_size=1, max_size=4))
    before = bytes(payload)
    payload[at : at + len(burst)] = burst
    if payload != before:
        with pytest.raises(WireError):
            Manifest.decode(bytes(payload))


def test_refusing_leaves_nothing_behind() -> None:
    gc.collect()
    before = len(gc.get_objects())
    for _, _, make in CASES:
        with pytest.raises(WireError):
            Manifest.decode(make())
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def test_a_header_at_the_limit_is_read() -> None:
    payload = broken_headers.largest(last="00000000")
    assert len(Manifest.decode(payload).tensors) == 4096
    assert int.from_bytes(payload[:8], "little") < MAX_HEADER


def test_the_tree_that_the_cases_change_is_read() -> None:
    found = Manifest.decode(broken_headers.tree_payload())
    assert found.kind == "TensorTransferData"
    assert [spec.name for spec in found.tensors] == broken_headers.TREE_NAMES
