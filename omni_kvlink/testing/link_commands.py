"""The commands of a conformance peer: links, and what was put on or received from them."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.link import KVLink, PutStream, Received, ReceivedStream
from omni_kvlink.testing.caches import (
    Recipe,
    chunk,
    fingerprint,
    hash_tensors,
    identify,
    layers_of,
    parts_of,
)
from omni_kvlink.testing.peer_harness import CommandSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import AppendStream, ChunkStream, ReceivedChunk
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.views import TensorView
    from omni_kvlink.testing.caches import Layers


class LinkCommands(CommandSet):
    """Links by name; `key` is the request id of a payload that one of them has.

    Payloads travel as recipes and fingerprints, see `omni_kvlink.testing.caches`. `options` are
    those of the `KVLink` method that the command is named for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, Any] = {}  # a `KVProducer` or a `KVConsumer`
        self._receipts: dict[str, Receipt] = {}
        self._held: dict[str, list[TensorView]] = {}
        self._open: dict[str, Received] = {}
        self._writing: dict[str, tuple[PutStream, Layers]] = {}
        self._streams: dict[str, ReceivedStream] = {}
        self._appending: dict[str, AppendStream] = {}
        self._growing: dict[str, ChunkStream[ReceivedChunk]] = {}

    def close_all(self) -> None:
        """Release every payload, fail every stream that is being written, close every link."""
        for key in [*self._held, *self._open, *self._streams, *self._growing]:
            self.release(key)
        for key in list(self._writing):
            self.fail_stream(key, "its peer was closed")
        for key in list(self._appending):
            self._appending.pop(key).fail("its peer was closed")
        for link in list(self._links):
            self.remove(link)
        self._receipts.clear()

    def serve(self, link: str, url: str, **options: Any) -> None:
        """Make a producer's link."""
        self._links[link] = KVLink.serve(url, **options)

    def connect(self, link: str, url: str, **options: Any) -> None:
        """Make a consumer's link; blocks until it is connected."""
        self._links[link] = KVLink.connect(url, **options)

    def put(self, link: str, recipe: dict[str, Any], **options: Any) -> None:
        """Put the payload of a recipe, and keep its receipt."""
        data = Recipe(**recipe).make()
        self._receipts[data.request_id] = self._links[link].put(data, **options)

    def put_many(self, link: str, recipes: list[dict[str, Any]], **options: Any) -> None:
        """Put the payloads of several recipes together, and keep their receipts."""
        payloads = [Recipe(**recipe).make() for recipe in recipes]
        for receipt in self._links[link].put_many(payloads, **options):
            self._receipts[receipt.key] = receipt

    def wait(self, key: str, timeout: float) -> None:
        """Wait for the receipt of a payload that was put."""
        self._receipts[key].wait(timeout=timeout)

    def get(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload and release it; its fingerprint."""
        with self._links[link].get(key, **options) as data:
            return fingerprint(data)

    def get_many(self, link: str, keys: list[str], **options: Any) -> list[str]:
        """Receive several payloads together and release them; their fingerprints."""
        with self._links[link].get_many(keys, **options) as payloads:
            return list(map(fingerprint, payloads))

    def hold(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload, and keep its tensors beyond the `with` block; its fingerprint."""
        with self._links[link].get(key, **options) as data:
            self._held[key] = _tensors(data)
            return fingerprint(data)

    def open(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload, and stay inside the `with` block; its fingerprint."""
        received = self._open[key] = self._links[link].get(key, **options)
        return fingerprint(received.data)

    def stream_put(self, link: str, recipe: dict[str, Any], **options: Any) -> None:
        """Begin a stream for `write`, `commit` and `fail_stream`."""
        data = Recipe(**recipe).make()
        out = self._links[link].stream_put(data, **options)
        self._writing[data.request_id] = out, layers_of(data)

    def write(self, key: str, layer: int, branch: str = "kv") -> None:
        """Write one layer of a stream."""
        out, layers = self._writing[key]
        out.write_layer(layer, *layers[branch, layer], branch=branch)

    def commit(self, key: str) -> None:
        """Commit a stream, and keep its receipt."""
        self._receipts[key] = self._writing.pop(key)[0].commit()

    def fail_stream(self, key: str, reason: str) -> None:
        """Leave the block of `stream_put` by an error."""
        self._writing.pop(key)[0].__exit__(RuntimeError, RuntimeError(reason), None)

    def stream_get(self, link: str, key: str, **options: Any) -> list[list[Any]]:
        """Wait until a stream begins, and keep it; the names of its layers."""
        stream = self._streams[key] = self._links[link].stream_get(key, **options)
        return list(map(list, stream.names()))

    def wait_layer(self, key: str, layer: int, **options: Any) -> str:
        """Wait for one layer of a stream; the hash of its tensors."""
        return hash_tensors(self._streams[key].wait_for_layer(layer, **options).tensors)

    def scatter_layer(self, key: str, layer: int, **options: Any) -> str:
        """Wait for one layer of a stream and copy it out; the hash of the copies."""
        received = self._streams[key].wait_for_layer(layer, **options)
        targets = [torch.zeros_like(tensor) for tensor in received.tensors]
        received.scatter(*targets)
        return hash_tensors(targets)

    def wait_stream(self, key: str, timeout: float | None = None) -> str:
        """Wait for a stream's commit; the fingerprint of its payload."""
        return fingerprint(self._streams[key].wait(timeout=timeout))

    def open_stream(self, link: str, key: str, **options: Any) -> None:
        """Open an append stream for `append` and `commit_chunks`."""
        self._appending[key] = self._links[link].open_stream(key, chunk(0), **options)

    def append(self, key: str, number: int, timeout: float = 60) -> int:
        """Append the chunk that `caches.chunk` makes of a number; its number in the stream."""
        return self._appending[key].append(chunk(number), timeout=timeout)

    def commit_chunks(self, key: str) -> None:
        """Commit an append stream, and keep its receipt."""
        self._receipts[key] = self._appending.pop(key).commit()

    def read_stream(self, link: str, key: str, **options: Any) -> None:
        """Wait until an append stream is opened, and keep it for `receive`."""
        self._growing[key] = self._links[link].read_stream(key, **options)

    def receive(self, key: str, timeout: float | None = None) -> tuple[int, str] | None:
        """Receive a chunk: its number and the hash of its tensors; None at the end."""
        received = self._growing[key].receive(timeout=timeout)
        return None if received is None else identify(received)

    def receive_all(self, key: str) -> list[tuple[int, str]]:
        """Receive the chunks that are left; the number of each and the hash of its tensors."""
        return [identify(received) for received in self._growing[key]]

    def hash_held(self, key: str) -> str:
        """The hash of the tensors that `hold` kept, as they are now."""
        return hash_tensors(self._held[key])

    def release(self, key: str) -> None:
        """Release what `hold`, `open`, `stream_get` or `read_stream` kept."""
        self._held.pop(key, None)
        received = self._open.pop(key, None) or self._streams.pop(key, None)
        if received is not None:
            received.release()
        if key in self._growing:
            self._growing.pop(key).release()

    def release_unread(self, key: str) -> None:
        """Let another reader go on with what `read_stream` kept."""
        self._growing.pop(key).release_unread()

    def release_one(self, key: str) -> int:
        """Drop one tensor that `hold` kept; the number of those left."""
        self._held[key].pop()
        return len(self._held[key])

    def use_after_block(self, link: str, key: str, **options: Any) -> None:
        """Use a payload after its `with` block."""
        received = self._links[link].get(key, **options)
        with received as data:
            pass
        _tensors(data)

    def fail(self, link: str, key: str, reason: str) -> None:
        """Call `fail` of a link."""
        self._links[link].fail(key, reason)

    def abort(self, link: str, key: str, reason: str) -> None:
        """Call `abort` of a link."""
        self._links[link].abort(key, reason)

    def stats(self, link: str) -> Any:
        """The statistics of a link."""
        return self._links[link].stats()

    def close(self, link: str) -> None:
        """Close a link; its name stays, so that use after it can be tested."""
        self._links[link].close()

    def remove(self, link: str) -> None:
        """Close a link, if there is one of this name, and forget the name."""
        endpoint = self._links.pop(link, None)
        if endpoint is not None:
            endpoint.close()

    def usage(self) -> dict[str, float]:
        """The CPU seconds and page faults of this process so far, its descriptors and threads."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu": used.ru_utime + used.ru_stime,
            "faults": used.ru_minflt + used.ru_majflt,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }

    def fork(self, link: str, linger: float) -> dict[str, str]:
        """Fork; the error's name that each method of the link raises in the child, and "pid".

        That of a method that the link does not have is `AttributeError`. The child keeps all that
        it inherited for `linger` seconds, unless it is killed.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.write(writing, json.dumps(self._errors_in_child(link)).encode())
            os.close(writing)
            time.sleep(linger)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            names: dict[str, str] = json.loads(pipe.read())
        return {**names, "pid": str(child)}

    def _errors_in_child(self, link: str) -> dict[str, str]:
        parent_link = self._links[link]
        data = Recipe("of-the-child").make()
        methods: dict[str, Callable[[], Any]] = {
            "put": lambda: parent_link.put(data),
            "get": lambda: parent_link.get("k", timeout=0.1),
            "fail": lambda: parent_link.fail("k", "x"),
            "abort": lambda: parent_link.abort("k"),
            "stats": parent_link.stats,
            "close": parent_link.close,
        }
        return {name: _error_name(method) for name, method in methods.items()}


def _tensors(data: Payload) -> list[TensorView]:
    return [tensor for part in parts_of(data).values() for tensor in part.tensors()]


def _error_name(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""
