"""The other side of a test: links that do as they are told, here or in a process of their own.

`python -m omni_kvlink.testing` reads one JSON command a line, such as
`{"id": 1, "verb": "get", "link": "a", "key": "k", "timeout": 5}`, runs each in a thread of its own
(so that a waiting `get` can be aborted, closed or killed) and writes one JSON answer a line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.errors import KVLinkError
from omni_kvlink.link import KVLink, Payload, PutStream, Received, ReceivedStream
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.views import TensorView
from omni_kvlink.testing.caches import Layers, Recipe, fingerprint, hash_tensors, layers_of


class Peer:
    """Named links and what they hold; every verb takes and gives JSON values."""

    def __init__(self) -> None:
        self._links: dict[str, KVLink] = {}
        self._receipts: dict[str, Receipt] = {}
        self._held: dict[str, list[TensorView]] = {}
        self._open: dict[str, Received] = {}
        self._writing: dict[str, tuple[PutStream, Layers]] = {}
        self._streams: dict[str, ReceivedStream] = {}

    def do(self, verb: str, arguments: dict[str, Any]) -> Any:
        return _VERBS[verb](self, **arguments)

    def end(self) -> None:
        """Let go of everything and close every link."""
        for key in [*self._held, *self._open, *self._streams]:
            self.drop(key)
        for key in list(self._writing):
            self.give_up(key, "its peer ended")
        for link in list(self._links):
            self.forget(link)
        self._receipts.clear()

    def serve(self, link: str, url: str, **options: Any) -> None:
        self._links[link] = KVLink.serve(url, **options)

    def connect(self, link: str, url: str, **options: Any) -> None:
        self._links[link] = KVLink.connect(url, **options)

    def put(self, link: str, recipe: dict[str, Any], **how: Any) -> None:
        data = Recipe(**recipe).make()
        self._receipts[data.request_id] = self._links[link].put(data, **how)

    def wait(self, key: str, timeout: float) -> None:
        self._receipts[key].wait(timeout=timeout)

    def get(self, link: str, key: str, **how: Any) -> str:
        """Receive, compare by fingerprint, let go."""
        with self._links[link].get(key, **how) as data:
            return fingerprint(data)

    def hold(self, link: str, key: str, **how: Any) -> str:
        """Receive, and keep the tensors beyond the `with` block."""
        with self._links[link].get(key, **how) as data:
            self._held[key] = _tensors(data)
            return fingerprint(data)

    def open(self, link: str, key: str, **how: Any) -> str:
        """Receive, and stay inside the `with` block."""
        received = self._open[key] = self._links[link].get(key, **how)
        return fingerprint(received.data)

    def stream_put(self, link: str, recipe: dict[str, Any], **how: Any) -> None:
        """Begin; `write`, `commit` and `give_up` go on with it."""
        data = Recipe(**recipe).make()
        out = self._links[link].stream_put(data, **how)
        self._writing[data.request_id] = out, layers_of(data)

    def write(self, key: str, layer: int, branch: str = "kv") -> None:
        out, layers = self._writing[key]
        out.write_layer(layer, *layers[branch, layer], branch=branch)

    def commit(self, key: str) -> None:
        self._receipts[key] = self._writing.pop(key)[0].commit()

    def give_up(self, key: str, why: str) -> None:
        """Leave the block of `stream_put` by an error."""
        self._writing.pop(key)[0].__exit__(RuntimeError, RuntimeError(why), None)

    def stream_get(self, link: str, key: str, **how: Any) -> list[list[Any]]:
        """Wait for the beginning, and keep the stream for `layer` and `whole`."""
        stream = self._streams[key] = self._links[link].stream_get(key, **how)
        return list(map(list, stream.names()))

    def layer(self, key: str, layer: int, branch: str = "", timeout: float | None = None) -> str:
        """Wait for one layer of a stream; its bytes."""
        stream = self._streams[key]
        return hash_tensors(stream.wait_for_layer(layer, branch=branch, timeout=timeout).tensors)

    def scatter(self, key: str, layer: int, branch: str = "", timeout: float | None = None) -> str:
        """Wait for one layer of a stream and copy it out; the bytes that landed."""
        found = self._streams[key].wait_for_layer(layer, branch=branch, timeout=timeout)
        targets = [torch.zeros_like(tensor) for tensor in found.tensors]
        found.scatter(*targets)
        return hash_tensors(targets)

    def whole(self, key: str, timeout: float | None = None) -> str:
        """Wait for a stream's commit; the fingerprint of all."""
        return fingerprint(self._streams[key].wait(timeout=timeout))

    def look(self, key: str) -> str:
        """The bytes that are held, now."""
        return hash_tensors(self._held[key])

    def drop(self, key: str) -> None:
        """Let go of what `hold`, `open` or `stream_get` kept."""
        self._held.pop(key, None)
        received = self._open.pop(key, None) or self._streams.pop(key, None)
        if received is not None:
            received.release()

    def drop_one(self, key: str) -> int:
        """Let go of one tensor that is held; how many are left."""
        self._held[key].pop()
        return len(self._held[key])

    def use_after_block(self, link: str, key: str, **how: Any) -> None:
        received = self._links[link].get(key, **how)
        with received as data:
            pass
        _tensors(data)

    def fail(self, link: str, key: str, reason: str) -> None:
        self._links[link].fail(key, reason)

    def abort(self, link: str, key: str, reason: str) -> None:
        self._links[link].abort(key, reason)

    def stats(self, link: str) -> dict[str, Any]:
        return self._links[link].stats()

    def close(self, link: str) -> None:
        self._links[link].close()

    def forget(self, link: str) -> None:
        """Close, and keep nothing of it."""
        found = self._links.pop(link, None)
        if found is not None:
            found.close()

    def usage(self) -> dict[str, float]:
        """What this process has cost so far, and what it has open."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu": used.ru_utime + used.ru_stime,
            "faults": used.ru_minflt + used.ru_majflt,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }

    def fork(self, link: str, linger: float) -> dict[str, str]:
        """Fork; the child's answer to each verb, and its "pid".

        It stays for `linger` seconds with all it has, unless it is killed.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.write(writing, json.dumps(self._as_child(link)).encode())
            os.close(writing)
            time.sleep(linger)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answers: dict[str, str] = json.loads(pipe.read())
        return {**answers, "pid": str(child)}

    def _as_child(self, link: str) -> dict[str, str]:
        mine = self._links[link]
        data = Recipe("of-the-child").make()
        verbs: dict[str, Callable[[], Any]] = {
            "put": lambda: mine.put(data),
            "get": lambda: mine.get("k", timeout=0.1),
            "fail": lambda: mine.fail("k", "x"),
            "abort": lambda: mine.abort("k"),
            "stats": mine.stats,
            "close": mine.close,
        }
        return {name: _error_name(verb) for name, verb in verbs.items()}


_VERBS: dict[str, Callable[..., Any]] = {
    name: verb for name, verb in vars(Peer).items() if not name.startswith("_") and name != "do"
}


def _tensors(data: Payload) -> list[TensorView]:
    if isinstance(data, KVCacheBundle):
        return [tensor for name in data for tensor in data[name].tensors()]
    return data.tensors()


def _error_name(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def _answer(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    number, verb = command.pop("id"), command.pop("verb")
    try:
        return {"id": number, "result": peer.do(verb, command)}
    except KVLinkError as error:
        facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        return {"id": number, "error": type(error).__name__, "text": str(error), "facts": facts}
    except Exception as error:
        return {"id": number, "error": "Exception", "text": repr(error), "facts": {}}


def main() -> None:
    """Serve commands until the end of the input; then leave without saying good-bye."""
    peer, lock = Peer(), threading.Lock()

    def run(command: dict[str, Any]) -> None:
        line = json.dumps(_answer(peer, command))
        with lock:
            print(line, flush=True)

    for line in sys.stdin:
        threading.Thread(target=run, args=(json.loads(line),), daemon=True).start()
    os._exit(0)
