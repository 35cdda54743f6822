"""Mistakes that everybody makes: each meets an error that names the thing and the cure.

Python's own errors are left where the signature is wrong: they name the function.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from omni_kvlink import (
    CapacityError,
    ClosedError,
    ConnectorError,
    DuplicateKeyError,
    KVCacheBundle,
    KVCacheTransferData,
    KVLink,
    KVLinkError,
    KVMetadata,
    MissingFileError,
    PagedTensor,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    UnavailableError,
)
from omni_kvlink.adapters import DynamicCacheAdapter, PagedAdapter
from omni_kvlink.errors import BusyError, FileError
from support.link.ends import delivery_of
from support.payloads.random_caches import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_kvlink import KVConsumer, KVProducer, PutStream, Received

T = torch.arange(64, dtype=torch.float32).reshape(4, 2, 8)
ABOUT = {"kv_lens": [4], "ropes": [4], "num_layers": 1}


class Ends(NamedTuple):
    """Both ends of a link, whatever the types of what they are given."""

    producer: Any
    consumer: Any

    def got(self, data: TensorTransferData | KVCacheTransferData | None = None) -> Any:
        """A payload that was put and got."""
        data = data or tensors()
        self.producer.put(data)
        return self.consumer.get(data.request_id, timeout=60)

    def left(self) -> Any:
        """The data of a block that has ended."""
        with self.got() as data:
            pass
        return data

    def released(self) -> Received:
        """A payload that was released."""
        received: Received = self.got()
        received.release()
        return received

    def stream(self) -> PutStream:
        """A cache of one layer that is being sent."""
        out: PutStream = self.producer.stream_put(blank())
        _opened.append(out)
        return out

    def opened(self) -> Any:
        """An append stream."""
        _opened.append(self.producer.open_stream("s", {"h": T}))
        return _opened[-1]


_opened: list[Any] = []


def tensors(name: str = "r") -> TensorTransferData:
    return TensorTransferData(name, {"h": T, "ids": T[0]})


def cache(blocks: Any = None, metadata: Any = ABOUT) -> KVCacheTransferData:
    found = {"key_cache": [T], "value_cache": [T]} if blocks is None else blocks
    return KVCacheTransferData("r", found, metadata=metadata)


def blank(**changes: Any) -> KVCacheTransferData:
    given: dict[str, Any] = {"row": (2, 8), "dtype": torch.float32, "metadata": ABOUT}
    return KVCacheTransferData.blank("r", **{**given, **changes})


def closed() -> Any:
    producer = KVLink.serve("inproc://closed")
    producer.close()
    return producer


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    directory = str(tmp_path)
    with (
        KVLink.serve("shm://m", directory=directory, quota=4 << 20) as producer,
        KVLink.connect("shm://m", directory=directory, timeout=60) as consumer,
    ):
        yield Ends(producer, consumer)


Mistake = tuple[str, "Callable[[Ends], object]", type[BaseException], tuple[str, ...]]
MISTAKES: list[Mistake] = [
    # what is put
    ("put a dict", lambda e: e.producer.put({"h": T}), SchemaError, ("put", "dict", "TensorTr")),
    ("put a tensor", lambda e: e.producer.put(T), SchemaError, ("put", "Tensor", "TensorTransf")),
    ("put None", lambda e: e.producer.put(None), SchemaError, ("put", "NoneType", "TensorTransf")),
    ("put received", lambda e: e.producer.put(e.got()), SchemaError, ("put", "Received")),
    ("put an id first", lambda e: e.producer.put("r", {"h": T}), TypeError, ("KVProducer.put()",)),
    ("stream a dict", lambda e: e.producer.stream_put({"h": T}), SchemaError, ("stream_put",)),
    ("allocate bytes", lambda e: e.producer.allocate(1000), SchemaError, ("allocate", "int")),
    ("put_many one", lambda e: e.producer.put_many(tensors()), SchemaError, ("put_many", "list")),
    ("put_many None", lambda e: e.producer.put_many(None), SchemaError, ("put_many", "list")),
    ("put_many dicts", lambda e: e.producer.put_many([{"h": T}]), SchemaError, ("payload 0",)),
    ("put a plan", lambda e: e.producer.put(blank()), SchemaError, ("layer 0, K", "blank()")),
    (
        "put a meta tensor",
        lambda e: e.producer.put(TensorTransferData("r", {"h": T.to("meta")})),
        SchemaError,
        ("'h'", "meta device", "device with memory"),
    ),
    (
        "put a key twice",
        lambda e: e.producer.put_many([tensors("a")]) and e.producer.put(tensors("a")),
        DuplicateKeyError,
        ("'a'", "committed", "receipt"),
    ),
    (
        "put more than the quota",
        lambda e: e.producer.put(TensorTransferData("r", {"h": torch.zeros(2 << 20)})),
        CapacityError,
        ("'r'", "never fit", f"quota of {4 << 20}", "quota=839"),
    ),
    (
        "put_many more than the quota",
        lambda e: e.producer.put_many(
            TensorTransferData(name, {"h": torch.zeros(600_000)}) for name in "ab"
        ),
        CapacityError,
        ("2 payloads", f"quota of {4 << 20}", "fewer"),
    ),
    (
        "put directly over shared memory",
        lambda e: e.producer.put(tensors(), direct=True),
        SchemaError,
        ("direct=True", "'h'", "without direct=True"),
    ),
    (
        "put in the background",
        lambda e: e.producer.put(tensors(), background=True),
        SchemaError,
        ("background=True", "allocate()"),
    ),
    ("put when closed", lambda e: closed().put(tensors()), ClosedError, ("closed",)),
    ("put at the consumer", lambda e: e.consumer.put(T), AttributeError, ("'put'", "KVProducer")),
    ("get at the producer", lambda e: e.producer.get("r"), AttributeError, ("'get'", "KVConsum")),
    ("fail without a reason", lambda e: e.producer.fail("r"), TypeError, ("fail()", "reason")),
    ("fail with None", lambda e: e.producer.fail("r", None), SchemaError, ("reason", "None")),
    (
        "abort with an error",
        lambda e: e.consumer.abort("r", ValueError("x")),
        SchemaError,
        ("reason", "ValueError"),
    ),
    # how a payload is made
    ("numpy", lambda e: TensorTransferData("r", {"h": np.ones(3)}), SchemaError, ("'h'", "ndar")),
    ("floats", lambda e: TensorTransferData("r", {"h": [1.0]}), SchemaError, ("'h/0'", "float")),
    ("a list", lambda e: TensorTransferData("r", [T]), SchemaError, ("list", "dict")),  # type: ignore[arg-type]
    ("a generator", lambda e: TensorTransferData("r", {"h": iter([T])}), SchemaError, ("'h'",)),
    ("swapped", lambda e: TensorTransferData({"h": T}, "r"), SchemaError, ("request_id", "dict")),  # type: ignore[arg-type]
    ("an int as id", lambda e: TensorTransferData(7, {"h": T}), SchemaError, ("request_id", "7")),  # type: ignore[arg-type]
    ("an int as name", lambda e: TensorTransferData("r", {0: T}), SchemaError, ("key '0'",)),  # type: ignore[dict-item]
    (
        "a tensor in the metadata",
        lambda e: TensorTransferData("r", {"h": T}, {"x": T}),
        SchemaError,
        ("metadata", "JSON", "Tensor"),
    ),
    (
        "misspelt metadata",
        lambda e: cache(metadata={"kv_len": [4], "rope": [4], "num_layers": 1}),
        SchemaError,
        ("lacks kv_lens, ropes", "'kv_len' meant as 'kv_lens'", "'rope' meant as 'ropes'"),
    ),
    ("no metadata", lambda e: cache(metadata=None), SchemaError, ("missing", "kv_lens")),
    ("text as metadata", lambda e: cache(metadata="x"), SchemaError, ("'x'", "kv_lens")),
    (
        "one length",
        lambda e: cache(metadata={**ABOUT, "kv_lens": 4}),
        SchemaError,
        ("kv_lens", "[4]"),
    ),
    (
        "a text as shard",
        lambda e: KVMetadata((4,), (4,), 1, shard="x"),  # type: ignore[arg-type]
        SchemaError,
        ("shard", "str"),
    ),
    (
        "too few layers",
        lambda e: cache(metadata={**ABOUT, "num_layers": 3}),
        SchemaError,
        ("K: 1 layers", "num_layers is 3"),
    ),
    (
        "wrong lengths",
        lambda e: cache(metadata={**ABOUT, "kv_lens": [5]}),
        SchemaError,
        ("4 tokens", "[5]"),
    ),
    (
        "other names",
        lambda e: cache({"key": [T], "value": [T]}),
        SchemaError,
        ("'key'", "key_cache"),
    ),
    ("pairs", lambda e: cache([(T, T)]), SchemaError, ("layer_blocks is a list", "key_cache")),
    (
        "a tensor of all layers",
        lambda e: cache({"key_cache": T[None], "value_cache": T[None]}),
        SchemaError,
        ("key_cache", "Tensor", "list(t)"),
    ),
    (
        "a number as layers",
        lambda e: cache({"key_cache": 5, "value_cache": [T]}),
        SchemaError,
        ("key_cache", "5", "list"),
    ),
    (
        "a batch dimension",
        lambda e: cache({"key_cache": [T[None]], "value_cache": [T[None]]}),
        SchemaError,
        ("layer 0, K", "[1, 4, 2, 8]", "3 dimensions"),
    ),
    (
        "other dtypes",
        lambda e: cache({"key_cache": [T], "value_cache": [T.half()]}),
        SchemaError,
        ("layer 0, V", "float16", "float32"),
    ),
    (
        "integers",
        lambda e: cache({"key_cache": [T.long()], "value_cache": [T.long()]}),
        SchemaError,
        ("int64", "TensorTransferData"),
    ),
    ("a text as dtype", lambda e: blank(dtype="half"), SchemaError, ("dtype", "'half'")),
    ("one number as row", lambda e: blank(row=8), SchemaError, ("row", "8")),
    ("a bundle of a list", lambda e: KVCacheBundle("r", [cache()]), SchemaError, ("dict", "list")),  # type: ignore[arg-type]
    ("a bundle of tensors", lambda e: KVCacheBundle("r", {"a": T}), SchemaError, ("'a'", "Tensor")),  # type: ignore[dict-item]
    ("another id", lambda e: KVCacheBundle("x", {"a": cache()}), SchemaError, ("'r'", "'x'")),
    ("no block table", lambda e: PagedTensor(T, None), SchemaError, ("BlockTable", "of_blocks")),  # type: ignore[arg-type]
    (
        "export of a dict",
        lambda e: PagedAdapter().export({"k": T}, request_id="r", metadata=ABOUT),  # type: ignore[arg-type]
        SchemaError,
        ("dict", "PagedCache"),
    ),
    (
        "export of pairs",
        lambda e: DynamicCacheAdapter().export([(T, T)], request_id="r", metadata=ABOUT),  # type: ignore[arg-type]
        SchemaError,
        ("list", "DynamicCache"),
    ),
    # getting
    ("get without timeout", lambda e: e.consumer.get("r"), TypeError, ("KVConsumer.get()",)),
    ("get a list", lambda e: e.consumer.get(["r"], timeout=1), SchemaError, ("request_id", "list")),
    ("get nothing", lambda e: e.consumer.get("", timeout=1), SchemaError, ("request_id", "''")),
    ("get_many one", lambda e: e.consumer.get_many("r", timeout=1), SchemaError, ("'r'", "list")),
    ("get_many 3", lambda e: e.consumer.get_many(3, timeout=1), SchemaError, ("request_ids=3",)),
    ("timeout -1", lambda e: e.consumer.get("r", timeout=-1), ValueError, ("timeout", "-1")),
    ("verify yes", lambda e: e.consumer.get("r", timeout=1, verify="yes"), ValueError, ("verify",)),
    (
        "get a stream",
        lambda e: [e.opened(), e.consumer.get("s", timeout=60)],
        TransferFailed,
        ("'s'", "read_stream"),
    ),
    (
        "read_stream of a payload",
        lambda e: e.producer.put(tensors()) and e.consumer.read_stream("r", timeout=60),
        TransferFailed,
        ("'r'", "use get"),
    ),
    # what was received
    ("an unknown name", lambda e: e.got()["x"], KeyError, ("'x'", "h, ids")),
    ("a part of a cache", lambda e: e.got(cache())["key"], KeyError, ("'key'", "key_cache")),
    ("tensors()", lambda e: e.got().tensors(), AttributeError, ("Received", "`data.tensors`")),
    ("nonsense", lambda e: e.got().nonsense, AttributeError, ("Received", "'nonsense'")),
    ("after the block", lambda e: e.left()["h"], ClosedError, ("'r'", "`with` block", "clone")),
    ("after release", lambda e: e.released().data["h"], ClosedError, ("'r'", "released")),
    (
        "scatter after release",
        lambda e: e.released().scatter([T.clone()]),
        ClosedError,
        ("'r'", "released"),
    ),
    ("scatter a tensor", lambda e: e.got().scatter(T), SchemaError, ("scatter", "list", "Tensor")),
    ("scatter None", lambda e: e.got().scatter(None), SchemaError, ("scatter", "NoneType")),
    ("scatter a name", lambda e: e.got().scatter("h"), SchemaError, ("scatter", "str")),
    (
        "scatter other names",
        lambda e: e.got().scatter({"h": T.clone()}),
        SchemaError,
        ("scatter", "['h', 'ids']", "['h']"),
    ),
    (
        "scatter to numpy",
        lambda e: e.got().scatter([T.numpy().copy(), T[0].clone()]),
        SchemaError,
        ("'h'", "ndarray"),
    ),
    (
        "scatter another shape",
        lambda e: e.got().scatter([torch.ones(3), T[0].clone()]),
        SchemaError,
        ("'h'", "[3]", "[4, 2, 8]"),
    ),
    (
        "load into nothing",
        lambda e: PagedAdapter().load(e.got(cache()), into=None),  # type: ignore[arg-type]
        SchemaError,
        ("NoneType", "PagedCache"),
    ),
    # streams
    ("layer 9", lambda e: e.stream().write_layer(9, T, T), SchemaError, ("no layer 9",)),
    ("layer '0'", lambda e: e.stream().write_layer("0", T, T), SchemaError, ("no layer '0'",)),  # type: ignore[arg-type]
    ("no V", lambda e: e.stream().write_layer(0, T), SchemaError, ("1 tensors", "has 2")),
    (
        "numpy layers",
        lambda e: e.stream().write_layer(0, T.numpy(), T.numpy()),  # type: ignore[arg-type]
        SchemaError,
        ("layer 0", "ndarray"),
    ),
    ("too early", lambda e: e.stream().commit(), SchemaError, ("layer 0", "never written")),
    (
        "a layer that is not there",
        lambda e: (
            e.producer.put(cache()) and e.consumer.stream_get("r", timeout=60).wait_for_layer("0")
        ),
        SchemaError,
        ("no layer '0'",),
    ),
    ("a spec of one", lambda e: e.producer.open_stream("s", T), SchemaError, ("Tensor", "dict")),
    (
        "no such dimension",
        lambda e: e.producer.open_stream("s", {"h": T}, dim=7),
        SchemaError,
        ("'h'", "dimension 7"),
    ),
    ("append a tensor", lambda e: e.opened().append(T), SchemaError, ("Tensor", "dict")),
    ("append another", lambda e: e.opened().append({"g": T}), SchemaError, ("'g'", "'h'")),
    (
        "append swapped",
        lambda e: e.opened().append_requests({"h": T}, {"a": 4}),
        SchemaError,
        ("'h': a Tensor", "int"),
    ),
    # links and files
    ("no scheme", lambda e: KVLink.connect("m", timeout=1), ValueError, ("'m'", "shm://name")),
    ("tcp", lambda e: KVLink.serve("tcp://127.0.0.1:1"), UnavailableError, ("'tcp'", "zmq+tcp")),
    ("no port", lambda e: KVLink.serve("zmq+tcp://127.0.0.1"), SchemaError, ("host:port",)),
    ("no port of auto", lambda e: KVLink.serve("auto://a?tcp=h"), SchemaError, ("as in tcp=127",)),
    (
        "port 0",
        lambda e: KVLink.connect("zmq+tcp://127.0.0.1:0", timeout=1),
        SchemaError,
        ("port 0", "producer's url"),
    ),
    (
        "no keys",
        lambda e: KVLink.serve("zmq+tcp://10.1.2.3:5000"),
        ConnectorError,
        ("keys=", "kvlink keygen", "insecure=True"),
    ),
    ("a path as name", lambda e: KVLink.serve("shm:///tmp/x"), SchemaError, ("name is 1 to 48",)),
    ("no connect", lambda e: KVLink.connect("shm://m"), TypeError, ("connect()", "timeout")),  # type: ignore[call-arg]
    ("a missing file", lambda e: TensorTransferData.load("/no/x"), MissingFileError, ("/no/x",)),
    ("no directory", lambda e: tensors().save("/no/x"), FileError, ("/no/x",)),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams that are left open
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0].replace(" ", "-"))
def test_a_mistake_meets_an_error_that_says_what_is_wrong(ends: Ends, mistake: Mistake) -> None:
    _, make, kind, parts = mistake
    with pytest.raises(kind) as caught:
        make(ends)
    while _opened:  # else the collector finds it during another test
        _opened.pop().fail("left open")
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert "\n" not in text
    assert len(text) < 400
    if kind not in (TypeError, AttributeError, KeyError):  # Python's own, or an accessor's
        assert isinstance(caught.value, KVLinkError)


def test_each_mistake_has_a_name_of_its_own() -> None:
    assert len({name for name, *_ in MISTAKES}) == len(MISTAKES) >= 90


def test_the_quota_that_the_error_names_suffices(ends: Ends) -> None:
    large = TensorTransferData("r", {"h": torch.zeros(2 << 20)})
    with pytest.raises(CapacityError) as caught:
        ends.producer.put(large)
    with KVLink.serve("inproc://large", quota=caught.value.requested) as producer:
        assert producer.put(large).state == "committed"


def test_a_name_that_is_served_is_busy(tmp_path: Path, ends: Ends) -> None:
    with pytest.raises(BusyError, match="another producer serves this name"):
        KVLink.serve("shm://m", directory=str(tmp_path))
    with (
        KVLink.serve("zmq+tcp://127.0.0.1:0") as producer,
        pytest.raises(BusyError, match=re.escape(producer.url)),
    ):
        KVLink.serve(producer.url)


# ---- what is natural is taken


def test_items_of_a_received_payload(ends: Ends) -> None:
    received = ends.got()
    assert bits(received["h"]) == bits(T)
    assert list(received) == ["h", "ids"]
    assert "ids" in received
    received.release()
    received = ends.got(KVCacheTransferData("k", cache().layer_blocks, metadata=ABOUT))
    assert bits(received["value_cache"][0]) == bits(T)
    assert list(received.data) == ["key_cache", "value_cache"]


def test_scatter_by_name_in_any_order(ends: Ends) -> None:
    tree = {"a": T, "b": [T[0], {"c": T[1]}]}
    received = ends.got(TensorTransferData("r", tree))
    a, b, c = torch.zeros(4, 2, 8), torch.zeros(2, 8), torch.zeros(2, 8)
    for wrong in ({"a": a, "b": [b]}, {"a": a, "b": b}, {"a": a, "b": [b, {"d": c}]}):
        with pytest.raises(SchemaError, match="tensor 'b"):
            received.scatter(wrong)
    received.scatter({"b": [b, {"c": c}], "a": a})
    assert [bits(tensor) for tensor in (a, b, c)] == [bits(tensor) for tensor in (T, T[0], T[1])]
    key, value = torch.zeros(2, 4, 2, 8)
    ends.got(
        KVCacheTransferData("k", {"key_cache": [T], "value_cache": [-T]}, metadata=ABOUT)
    ).scatter({"value_cache": [value], "key_cache": [key]})
    assert (bits(key), bits(value)) == (bits(T), bits(-T))


@pytest.mark.parametrize("nbytes", [64, 100_000])
def test_generators_of_payloads_and_ids(ends: Ends, nbytes: int) -> None:
    given = {name: torch.full((nbytes,), ord(name), dtype=torch.uint8) for name in "abc"}
    payloads = (TensorTransferData(name, {"h": tensor}) for name, tensor in given.items())
    receipts = ends.producer.put_many(payloads)
    assert [receipt.key for receipt in receipts] == list(given)
    with ends.consumer.get_many(iter(given), timeout=60) as received:
        assert [bits(data["h"]) for data in received] == [bits(one) for one in given.values()]
    for receipt in receipts:
        receipt.wait(timeout=60)


def test_the_other_ends_verbs_are_not_attributes(ends: Ends) -> None:
    assert not hasattr(ends.producer, "get")
    assert not hasattr(ends.consumer, "put")
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\Z"):
        ends.producer.nonsense  # noqa: B018


# ---- what a REPL shows


def one_line(value: object) -> str:
    text = repr(value)
    assert "\n" not in text
    assert len(text) < 300
    assert " object at 0x" not in text
    return text


def test_reprs_say_what_it_is_and_how_far(ends: Ends) -> None:
    producer: KVProducer = ends.producer
    consumer: KVConsumer = ends.consumer
    assert "shm://m" in one_line(producer)
    receipt = producer.put(tensors())
    pending = consumer.begin_get_many(["r"], timeout=60)
    one_line(pending)
    batch = pending.wait(timeout=60)
    assert one_line(pending) == "<PendingBatch of 1 payloads, ended>"
    assert one_line(batch) == "<ReceivedBatch of 1 payloads>"
    assert one_line(batch[0]) == "<Received of <TensorTransferData 'r': h, ids>>"
    batch.release()
    assert one_line(batch[0]) == "<Received of <TensorTransferData 'r': (released)>>"
    receipt.wait(timeout=60)
    with producer.stream_put(blank()) as out:
        assert one_line(out) == "<PutStream 'r': 1 layers missing>"
        out.write_layer(0, T, T)
    assert one_line(out) == "<PutStream 'r': committed>"
    stream = consumer.stream_get("r", timeout=60)
    assert one_line(stream) == "<ReceivedStream 'r': 0 of 1 layers taken>"
    assert "0 of 'kv'" in one_line(next(iter(stream)))
    assert one_line(stream) == "<ReceivedStream 'r': 1 of 1 layers taken>"
    stream.release()
    with producer.open_stream("s", {"h": T}) as growing:
        growing.append({"h": T})
        assert one_line(growing) == "<AppendStream 's': 1 chunks, open>"
    assert one_line(growing) == "<AppendStream 's': 1 chunks, committed>"
    with consumer.read_stream("s", timeout=60) as chunks:
        one_line(chunks)
        assert one_line(next(iter(chunks))) == "<ReceivedChunk 0 of <TensorTransferData 's': h>>"


def test_a_repr_is_no_look_at_the_payload(ends: Ends) -> None:
    """A payload that was only shown goes to another reader."""
    receipt = ends.producer.put(tensors())
    received = ends.consumer.get("r", timeout=60)
    one_line(received)
    assert not delivery_of(received).is_read
    del received
    ends.consumer.get("r", timeout=60).release()
    receipt.wait(timeout=60)
