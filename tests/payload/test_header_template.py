"""Headers and plans of a known layout: the bytes and the checks are those of an unknown one."""

from __future__ import annotations

import random
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_kvlink import KVCacheBundle, KVCacheTransferData, SchemaError, TensorTransferData
from omni_kvlink._native import host
from omni_kvlink._native.crc32c import numpy_crc32c
from omni_kvlink.errors import WireError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.format import ALIGN, DIGEST_CHUNK, MAX_DEPTH
from omni_kvlink.payload.layout_cache import LayoutCache
from omni_kvlink.payload.manifest import MAX_SMALL, Layout, Manifest
from support.payloads import strategies
from support.payloads.headers import sealed
from support.payloads.random_caches import cache, empty
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.payload.bundle import Payload

# Reaches into _branches, _owners, _planned: the same plan is made without the layouts that are
# kept, which no caller of a link can choose.

few = settings(
    max_examples=EXAMPLES * 40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
HARD = [
    '","digests":["',
    '\\"',
    'header_crc32c":"00000000',
    "a\\",
    "é\U0001f600",
    "\x00\n",
    "\u2028",
]
"""Texts that look like fields of the header, or that JSON escapes."""

simple_ids = st.from_regex(r"[A-Za-z0-9_.:/@+=,-]{1,40}", fullmatch=True)
request_ids = simple_ids | strategies.request_ids | st.sampled_from(HARD)
extras = strategies.extras | st.dictionaries(st.sampled_from(HARD), st.sampled_from(HARD))


@pytest.fixture(autouse=True, params=["native", "python"])
def no_known_layout(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No layout is known, and headers are compared by the native library, or without one."""
    if request.param == "python":
        monkeypatch.setattr(host, "is_loaded", lambda: False)
    elif reason := host.missing():
        pytest.skip(reason)
    forget()
    yield
    forget()


layouts = LayoutCache()


def kept_plans() -> list[Layout]:
    """The layouts of what was put, of two generations."""
    # A layout that was not kept costs time and changes no byte: nothing public shows it.
    return [*layouts._planned.values(), *layouts._planned_before.values()]


def kept_headers() -> tuple[Layout, ...]:
    """The layouts of what arrived."""
    # As above.
    return layouts._received


def forget() -> None:
    vars(layouts).update(vars(LayoutCache()))


def planned(data: Payload, *, digests: bool = True) -> Manifest:
    """The plan as a link makes it."""
    return data.cached_plan(layouts, digests=digests)


def match(manifest: Manifest, text: bytes) -> str:
    """The request id of a header's JSON, if it is of the layout of a manifest."""
    layout = manifest.layout
    assert layout is not None
    return layout.match(text, 8 + len(text) + manifest.data_nbytes)


@st.composite
def tensor_data(draw: st.DrawFn) -> TensorTransferData:
    """Trees of small tensors, one of more than a MiB among them at times."""
    count = draw(st.integers(0, 4))
    shapes = draw(st.lists(st.sampled_from([(), (0, 3), (5,), (2, 3)]), min_size=count))
    tensors: list[Any] = [torch.zeros(shape, dtype=torch.int16) for shape in shapes]
    if draw(st.booleans()):
        tensors.append(torch.empty(DIGEST_CHUNK + 1, dtype=torch.uint8, device="meta"))
    names = draw(st.lists(st.sampled_from([*HARD, "a/b~", "x"]), unique=True, max_size=3))
    tree = {"list": tensors, **{name: torch.zeros(3) for name in names}}
    return TensorTransferData(draw(request_ids), tree, draw(extras))


payloads = strategies.caches() | strategies.bundles() | tensor_data()


def hexadecimal(plan: Manifest, seed: int) -> list[str]:
    """Digests of the widths of a plan."""
    chance = random.Random(seed)
    return ["".join(chance.choices("0123456789abcdef", k=len(s.digest))) for s in plan.tensors]


def planned_cold(data: Payload, *, digests: bool = True) -> Manifest:
    branches = data._branches()
    tensors = chain.from_iterable(map(data.reserve, branches))
    bundle = isinstance(data, KVCacheBundle)
    return Manifest.lay_out(data.request_id, branches, tensors, bundle=bundle, digests=digests)


def reference(manifest: Manifest) -> bytes:
    """The header from one encoder of the whole structure, as docs/wire.md describes it."""
    has_tree = any(branch.tree is not None for branch in manifest.branches)
    note = {
        "version": (1, int(has_tree)),
        "header_crc32c": "00000000",
        "request_id": manifest.request_id,
        "bundle": manifest.bundle,
        "branches": manifest.branches,
        "digest": "crc32c" if any(spec.digest for spec in manifest.tensors) else "off",
        "digests": [spec.digest for spec in manifest.tensors],
        "producer": manifest.producer,
    }
    entries: dict[str, Any] = {"__metadata__": {"kvlink": msgspec.json.encode(note).decode()}}
    at = pads = 0
    for spec in manifest.tensors:
        if spec.start > at:
            pad = {"dtype": "U8", "shape": [spec.start - at], "data_offsets": [at, spec.start]}
            entries[f"pad.{pads}"] = pad
            pads += 1
        span = [spec.start, spec.stop]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": span}
        at = spec.stop
    text = msgspec.json.encode(entries)
    text = text.ljust(max(len(text) + -(len(text) + 8) % ALIGN, manifest.header_nbytes - 8))
    first = text.index(b"00000000")  # before any text of the caller
    text = text[:first] + b"%08x" % numpy_crc32c(text) + text[first + 8 :]
    return len(text).to_bytes(8, "little") + text


def outcome(payload: bytes, total: int) -> object:
    """A manifest, or the error."""
    try:
        return layouts.decode(payload, total)
    except WireError as error:
        return type(error), str(error)


def assert_alike(known: Manifest, payload: bytes, total: int) -> None:
    """The same with the layout of `known` remembered as with none."""
    forget()
    cold = outcome(payload, total)
    forget()
    layouts.decode(known.encode(), known.nbytes)
    assert kept_headers()
    assert outcome(payload, total) == cold


# ---- encoding


@few
@given(payloads, request_ids, st.booleans(), st.integers(0, 99))
def test_the_bytes_are_those_of_one_encoder(
    data: Payload, request_id: str, digests: bool, seed: int
) -> None:
    plan = planned_cold(data, digests=digests)
    found = hexadecimal(plan, seed)
    manifest = plan.with_digests(found)
    assert manifest.encode() == plan.encode(found) == reference(manifest)
    other = msgspec.structs.replace(manifest, request_id=request_id, header_nbytes=0)
    layout = Layout(plan)
    assert layout.render(request_id, found) == other.encode() == reference(other)
    assert layout.plan(data.request_id) == plan
    assert layout.plan(request_id).header_nbytes == len(reference(other))
    larger = plan.as_capacity()
    assert larger.encode() == reference(larger)


@few
@given(payloads, request_ids, st.booleans())
def test_a_plan_of_a_known_layout_is_the_plan(data: Payload, name: str, digests: bool) -> None:
    forget()
    planned(data, digests=digests)
    assert len(kept_plans()) == 1
    data.request_id = name
    for branch in data._owners() if isinstance(data, KVCacheBundle) else []:
        branch.request_id = name
    cold, warm = planned_cold(data, digests=digests), planned(data, digests=digests)
    assert len(kept_plans()) == 1
    assert (warm, warm.encode()) == (cold, cold.encode())
    assert warm.header_nbytes == len(warm.encode())


def test_a_request_id_may_be_as_long_as_it_may_be() -> None:
    """A control character takes the most bytes of a header."""
    for name in ("\x01" * 1024, "\U0001f600" * 1024, '"' * 1024, "," * 1024, "x"):
        planned(cache())
        warm, cold = planned(cache(name)), planned_cold(cache(name))
        assert warm == cold
        assert layouts.decode(warm.encode(), warm.nbytes) == cold


def test_too_much_for_a_header_is_refused_as_ever() -> None:
    """A header near a limit is not kept, so that each request id is checked."""
    extra = {"a": "a" * ((1 << 19) - 3000)}
    assert planned(cache("x", layers=1, extra=extra)).header_nbytes < 1 << 19
    with pytest.raises(SchemaError, match="header"):
        planned(cache("\x01" * 1000, layers=1, extra=extra))
    assert len(kept_plans()) == 0


@pytest.mark.parametrize(
    "digests", [[], ["0" * 8] * 3, ["0" * 8] * 5, ["0" * 7] * 4, ["A" * 8] * 4, ['0000"000'] * 4]
)
def test_digests_that_do_not_fit_are_refused(digests: list[str]) -> None:
    with pytest.raises(SchemaError, match="digests"):
        planned(cache()).encode(digests)


# ---- decoding


@few
@given(payloads, simple_ids, st.booleans(), st.integers(0, 99))
def test_a_header_of_a_known_layout(
    data: Payload, request_id: str, digests: bool, seed: int
) -> None:
    plan = planned_cold(data, digests=digests)
    found = hexadecimal(plan, seed)
    header = Layout(plan).render(request_id, found)
    assert match(plan, header[8:]) == request_id
    assert Layout(plan).manifest(request_id, header[8:]).digests == found
    assert not match(plan, header[8:] + b" " * ALIGN)  # the CRC is of all
    assert not match(plan, header[8:-1]) or header[-1:] == b"}"
    first = Layout(plan).render("first", hexadecimal(plan, seed + 1))
    total = plan.nbytes - plan.header_nbytes
    forget()
    layouts.decode(first, len(first) + total)
    (known,) = kept_headers()
    warm = layouts.decode(header, len(header) + total)
    assert kept_headers() == (known,)
    forget()
    assert layouts.decode(header, len(header) + total) == warm
    assert warm.encode() == header


@pytest.mark.parametrize("name", [*HARD, "a b", "ü", "x" * 1024])
def test_other_request_ids_are_decoded_in_full(name: str) -> None:
    """Their layouts are not remembered: they would replace those that can be compared."""
    plan = planned(cache(name))
    assert layouts.decode(plan.encode(), plan.nbytes) == plan
    assert len(kept_headers()) == (name == "x" * 1024)
    assert bool(match(plan, plan.encode()[8:])) is (name == "x" * 1024)


def small() -> tuple[Manifest, bytes]:
    tensors = {"a": torch.zeros(3), "b": [torch.zeros(2, 2), torch.zeros(0)]}
    plan = planned(TensorTransferData("request-1", tensors, {"k": ["v", HARD[0]]}))
    header = plan.encode(hexadecimal(plan, 5))
    return layouts.decode(header, plan.nbytes), header


def test_metadata_that_was_received_may_be_modified() -> None:
    """And encoded; the next payload of the layout has what was sent."""
    first, header = small()
    known = layouts.decode(header, first.nbytes)
    assert known.branches[0].extra == first.branches[0].extra
    known.branches[0].extra["k"] = [7]
    assert layouts.decode(known.encode(), known.nbytes).branches[0].extra == {"k": [7]}
    assert layouts.decode(header, first.nbytes) == first


def test_no_changed_byte_is_accepted() -> None:
    manifest, header = small()
    for at in range(len(header)):
        for flip in (1, 2, 0x20, 0x80):
            changed = header[:at] + bytes([header[at] ^ flip]) + header[at + 1 :]
            layouts.decode(header, manifest.nbytes)
            warm = outcome(changed, manifest.nbytes)
            assert isinstance(warm, tuple)
            if flip == 1 and at % 4 == 0:
                assert_alike(manifest, changed, manifest.nbytes)


def resealed(text: bytes) -> bytes:
    """A header's JSON with the right CRC again and with its length."""
    at = text.find(b'header_crc32c\\":\\"')
    if at >= 0:
        at += 18
        text = text[:at] + b"00000000" + text[at + 8 :]
    return sealed(text.rstrip(b" "), 0)


PIECES = [b"", b" ", b"0", b"a", b"A", b"\\", b'"', b'\\"', b",", b'\\",\\"', b"\t", b"[", b"x"]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_changed_header_is_decoded_as_without_the_template(is_sealed: bool) -> None:
    """With the CRC made right again, too: then every other check is reached."""
    manifest, header = small()
    chance = random.Random(7)
    accepted = 0
    for _ in range(EXAMPLES * 1500):
        text = bytearray(header[8:])
        for _ in range(chance.randint(1, 2)):
            at = chance.randrange(len(text.rstrip()))
            text[at : at + chance.choice((0, 1, 1, 1, 2, 8))] = chance.choice(PIECES)
        changed = resealed(bytes(text)) if is_sealed else len(text).to_bytes(8, "little") + text
        if changed == header:
            continue
        total = manifest.nbytes - manifest.header_nbytes + len(changed)
        assert_alike(manifest, changed, total)
        accepted += isinstance(outcome(changed, total), Manifest)
    assert (accepted > 5) is is_sealed


@pytest.mark.parametrize(
    "change",
    [
        lambda text, _: text.replace(b"request-1", b'request-1\\",\\"bundle\\":false,\\"x\\":\\"'),
        lambda text, digest: text.replace(digest, digest.upper()),
        lambda text, digest: text.replace(digest, digest[:-1] + b"g"),
        lambda text, digest: text.replace(digest, digest[:-1]),
        lambda text, digest: text.replace(digest, digest + b"0"),
        lambda text, digest: text.replace(digest + b'\\"', digest + b'0"'),
        lambda text, _: text.replace(b"F32", b"I32", 1),
        lambda text, _: text.replace(b"}}", b"} }"),
        lambda text, _: text + b"\t",
        lambda text, _: text + b"x",
        lambda text, _: text.replace(b"\\\"host\\\"", b"\\\"best\\\""),
        lambda text, _: text.replace(b"request-1", b""),
        lambda text, _: text.replace(b"request-1", b"r" * 1025),
        lambda text, _: text.replace(b"request-1", "requést".encode()),
        lambda text, _: text.replace(b"[1,1]", b"[1,2]"),
    ],
)  # fmt: skip
def test_a_header_that_is_almost_known(change: Any) -> None:
    """Each has the right CRC, and differs where the comparison could be too loose."""
    manifest, header = small()
    text = header[8:].rstrip(b" ")
    changed_text = change(text, manifest.tensors[0].digest.encode())
    assert changed_text != text
    changed = resealed(changed_text)
    assert_alike(manifest, changed, manifest.nbytes - manifest.header_nbytes + len(changed))


@pytest.mark.parametrize("by", [-256, -1, 1, 256])
def test_a_known_layout_has_one_size(by: int) -> None:
    manifest, header = small()
    assert_alike(manifest, header, manifest.nbytes + by)
    assert isinstance(outcome(header, manifest.nbytes + by), tuple)


@pytest.mark.parametrize("nbytes", [256, 512, MAX_SMALL - 1024, MAX_SMALL, 2400 * ALIGN])
def test_more_padding_is_accepted_as_ever(nbytes: int) -> None:
    """A long header must be ASCII, also if all that is long is its padding."""
    data = TensorTransferData("r", {"a": torch.zeros(3)}, {"k": "ü"})
    manifest = planned(data)
    longer = msgspec.structs.replace(manifest, header_nbytes=manifest.header_nbytes + nbytes)
    header = longer.encode()
    total = manifest.nbytes - manifest.header_nbytes + len(header)
    assert_alike(manifest, header, total)
    assert isinstance(outcome(header, total), Manifest) is (nbytes < 1 << 19)


def test_the_padding_is_spaces() -> None:
    manifest, header = small()
    text = header[8:]
    assert text.endswith(b"  ")
    at = text.find(b'header_crc32c\\":\\"') + 18
    for space in (b"\t", b"\n", b"\0", b"}"):
        changed = text[:at] + b"00000000" + text[at + 8 : -1] + space
        changed = changed[:at] + b"%08x" % numpy_crc32c(changed) + changed[at + 8 :]
        assert not match(manifest, changed)
        assert_alike(manifest, header[:8] + changed, manifest.nbytes)


# ---- what is kept, and whose it is


def test_few_received_layouts_are_kept_the_last_ones() -> None:
    plans = [planned(cache("r", shape=(3, 2, size))) for size in range(1, 40)]
    for plan in plans:
        assert layouts.decode(plan.encode(), plan.nbytes) == plan
    assert len(kept_headers()) == 16
    oldest = plans[-16]
    assert layouts.decode(oldest.encode(), oldest.nbytes) == oldest
    first = kept_headers()[0]
    text = oldest.encode()[8:]
    assert first.manifest(first.match(text, oldest.nbytes), text) == oldest
    assert first.match(text, oldest.nbytes + 1) == ""
    assert len(kept_headers()) == 16


def test_few_planned_layouts_are_kept() -> None:
    hot = cache(layers=1, shape=(1, 1, 1))
    planned(hot)
    (kept,) = kept_plans()
    for size in range(2, 400):
        planned(cache(layers=1, shape=(1, 1, size)))
        planned(hot)
    assert 128 <= len(kept_plans()) <= 256
    everything = kept_plans()
    assert kept in list(everything)


def test_large_headers_and_long_block_ids_are_not_kept() -> None:
    large = cache(extra={"a": "a" * MAX_SMALL})
    for data in (large, cache(block_ids=range(65)), cache(extra={"a": [[]] * 15_000})):
        plan = planned(data)
        assert planned(data) == plan
        assert len(kept_plans()) == 0
    plan = planned(large)
    for _ in range(2):
        assert layouts.decode(plan.encode(), plan.nbytes) == plan
    assert kept_headers() == ()


def nested(request_id: str) -> KVCacheBundle:
    extra = {"a": [1, {"b": 2}], "c": 3}
    tensors = TensorTransferData(request_id, {"x": [torch.zeros(1), {}]}, {"a": {"b": [1]}})
    caches = {"gen": cache(request_id, extra=extra), "none": cache(request_id)}
    return KVCacheBundle(request_id, {**caches, "t": tensors, "e": empty(request_id)})


def spoil(manifest: Manifest) -> None:
    """Change everything of a manifest that can be changed."""
    for branch in manifest.branches:
        for value in (branch.extra, branch.tree):
            for inner in (value or {}).values():
                if isinstance(inner, list):
                    inner.append("changed")
                if isinstance(inner, dict):
                    inner.clear()
            if value is not None:
                value["changed"] = 1
    manifest.producer["host"] = "changed"


def test_a_callers_changes_reach_no_other_manifest() -> None:
    right = planned_cold(nested("r"))
    header = right.encode()
    for _ in range(4):
        plan = planned(nested("r"))
        assert (plan, plan.encode()) == (right, header)
        spoil(plan)
        manifest = layouts.decode(header, right.nbytes)
        assert manifest == right
        spoil(manifest)


def test_changed_metadata_of_a_payload_is_sent() -> None:
    """It is part of the key, so no header is written with what it was before."""
    data = cache(extra={"a": [1]})
    planned(data)
    data.metadata.extra["a"].append(2)
    assert planned(data).branches[0].extra == {"a": [1, 2]}
    tensors = TensorTransferData("r", {"x": torch.zeros(2)}, {"a": 1})
    planned(tensors)
    tensors.metadata["a"] = 1.0
    assert b'\\"a\\":1.0}' in planned(tensors).encode()


@pytest.mark.parametrize("extra", [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": 2**70}, {"b": 1}])
def test_layouts_differ_in_what_the_header_shows(extra: dict[str, Any]) -> None:
    others = ({"a": 1}, {"a": 1.0}, {"a": True}, {"a": 2**70}, {"b": 1})
    for other in others:
        planned(cache(extra=other))
    assert len(kept_plans()) == len(others)
    assert planned(cache(extra=extra)).encode() == planned_cold(cache(extra=extra)).encode()


def caches() -> list[KVCacheTransferData]:
    """No two say the same in their headers."""
    shard = {"rank": 0, "world": 2, "heads": [0, 2]}
    return [
        cache(),
        cache(layers=1),
        cache(ropes=[7]),
        cache(kv_lens=[1, 2], ropes=[3, 3]),
        cache(kv_lens=[2, 1], ropes=[3, 3]),
        cache(dtype="bfloat16"),
        cache(dtype="float16"),
        cache(shape=(3, 1, 8)),
        cache(shape=(3, 8)),
        cache(block_size=16),
        cache(block_size=16, block_ids=[1]),
        cache(block_size=16, block_ids=[2]),
        cache(image_shape=(2, 1)),
        cache(image_shape=(1, 2)),
        cache(extra={"a": 1}),
        cache(shard=shard),
        cache(shard=shard | {"heads": [2, 4]}),
        empty(),
        empty(layers=1),
        empty(ropes=[3]),
    ]


def test_layouts_differ_in_the_metadata_of_a_cache() -> None:
    for data in (*caches(), *caches()):
        assert planned(data) == planned_cold(data)
    assert len(kept_plans()) == len(caches())
    for data in caches():
        layout = data.find_layout(layouts, digests=True)
        assert layout in layouts._planned.values()
        assert layout.plan("r") == planned_cold(data)
        without = data.find_layout(layouts, digests=False)
        assert without.plan("r") == planned_cold(data, digests=False)


@pytest.mark.parametrize("value", [(None,), [float("nan")]], ids=["tuple", "nan"])
def test_metadata_that_was_changed_to_no_json_is_refused(value: Any) -> None:
    """Although its JSON text is that of a payload whose layout is known."""
    planned(cache(extra={"a": [None]}))
    data = cache(extra={"a": [None]})
    data.metadata.extra["a"] = value
    with pytest.raises(SchemaError, match="metadata: extra"):
        planned(data)
    with pytest.raises(SchemaError, match="metadata: extra"):
        data.find_layout(layouts, digests=True)


def test_layouts_differ_in_dtypes_and_shapes_of_a_tree() -> None:
    tensors = (torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3).int())
    for tensor in (*tensors, *tensors):
        data = TensorTransferData("r", {"x": tensor})
        bundle = KVCacheBundle("r", {"t": data})
        assert planned(data) == planned_cold(data)
        assert planned(bundle) == planned_cold(bundle)
        assert planned(data, digests=False) == planned_cold(data, digests=False)
    assert len(kept_plans()) == 3 * len(tensors)


def test_layouts_differ_in_names_and_nesting() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    trees: list[dict[str, Any]] = [
        {"x": x, "y": y},
        {"y": y, "x": x},
        {"x": x, "z": y},
        {"x": [x, y]},
        {"x": {"y": x}, "z": y},
        {str(name): x for name in range(65)},
    ]
    for tree in (*trees, *trees):
        for metadata in ({}, {"a": 1}):
            data = TensorTransferData("r", tree, metadata)
            assert planned(data) == planned_cold(data)
    assert len(kept_plans()) == 2 * len(trees)


def test_a_deep_extra_is_copied() -> None:
    extra: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        extra = {"a": extra}
    for _ in range(3):
        plan = planned(cache(extra=extra))
        assert plan.branches[0].extra == extra
        assert layouts.decode(plan.encode(), plan.nbytes) == plan


def test_many_threads() -> None:
    """More layouts than are kept, from several threads: each gets what is its own."""
    sizes, wrong = list(range(1, 25)), list[str]()

    def run(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(200):
            size, name = chance.choice(sizes), f"{seed}-{number}"
            plan = planned(cache(name, layers=1, shape=(1, 1, size)))
            header = plan.encode(hexadecimal(plan, number))
            found = layouts.decode(header, plan.nbytes)
            if found.request_id != name or found.encode() != header:
                wrong.append(name)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept_headers()) <= 16


def test_a_cache_that_was_received_has_metadata_of_its_own() -> None:
    """Two gets of one layout share nothing that can be changed."""
    plan = planned(cache(extra={"a": [1]}))
    region = Mapping.anonymous(plan.nbytes).region
    for _ in range(3):
        manifest = layouts.decode(plan.encode(), plan.nbytes)
        received = KVCacheTransferData.from_region(manifest, region)
        assert received.metadata == cache(extra={"a": [1]}).metadata
        received.metadata.extra["a"].append(2)
        received.metadata.extra["b"] = 1


def test_the_layout_that_is_repeated() -> None:
    """Not that of one header, and not the last one where layouts alternate."""
    first, second = (planned(cache("a", layers=layers)) for layers in (2, 3))
    seen = []
    for each in (first, first, second, first, first, second, second):
        layouts.decode(each.encode(), each.nbytes)
        seen.append(layouts.repeated(1 << 20) is not None)
    assert seen == [False, True, False, False, True, False, True]


def test_manifests_share_no_empty_metadata() -> None:
    for data in (cache(), TensorTransferData("r", {"x": torch.zeros(2)}), nested("r")):
        header = planned_cold(data).encode()
        for _ in range(3):
            plan = planned(data)
            received = layouts.decode(header, plan.nbytes)
            for manifest in (plan, received):
                assert manifest == planned_cold(data)
                for branch in manifest.branches:
                    branch.extra["changed"] = 1
