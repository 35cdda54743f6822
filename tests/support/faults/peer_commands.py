"""`python -m support.faults.peer_commands`: a peer whose links also send and fork.

The conformance kit's own peer, `python -m omni_kvlink.testing`, has the commands of readers.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.link import KVLink, PutStream
from omni_kvlink.testing.caches import Recipe, chunk, fingerprint, layers_of
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import ProcessPeer, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import AppendStream
    from omni_kvlink.testing.caches import Layers

TESTS = Path(__file__).resolve().parents[2]

TESTS = Path(__file__).resolve().parents[2]


class PeerCommands(LinkCommands):
    """Commands of producers beside those of readers, and of what a process uses and inherits."""

    def __init__(self) -> None:
        super().__init__()
        self._receipts: dict[str, Receipt] = {}
        self._writing: dict[str, tuple[PutStream, Layers]] = {}
        self._appending: dict[str, AppendStream] = {}

    def close_all(self) -> None:
        """Release every payload, fail every stream that is being written, close every link."""
        for key in list(self._writing):
            self.fail_stream(key, "its peer was closed")
        for key in list(self._appending):
            self._appending.pop(key).fail("its peer was closed")
        super().close_all()
        self._receipts.clear()

    def serve(self, link: str, url: str, **options: Any) -> None:
        """Make a producer's link."""
        self._links[link] = KVLink.serve(url, **options)

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

    def open(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload, and stay inside the `with` block; its fingerprint."""
        received = self.kept[key] = self._links[link].get(key, **options)
        return fingerprint(received.data)

    def fail(self, link: str, key: str, reason: str) -> None:
        """Call `fail` of a link."""
        self._links[link].fail(key, reason)

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

    def open_stream(self, link: str, key: str, **options: Any) -> None:
        """Open an append stream for `append` and `commit_chunks`."""
        self._appending[key] = self._links[link].open_stream(key, chunk(0), **options)

    def append(self, key: str, number: int, timeout: float = 60) -> int:
        """Append the chunk that `caches.chunk` makes of a number; its number in the stream."""
        return self._appending[key].append(chunk(number), timeout=timeout)

    def commit_chunks(self, key: str) -> None:
        """Commit an append stream, and keep its receipt."""
        self._receipts[key] = self._appending.pop(key).commit()

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


def _error_name(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def start_peer(
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    *,
    module: str = "support.faults.peer_commands",
    arguments: tuple[str, ...] = (),
) -> ProcessPeer:
    """Start a process of these commands; `module` is another one that serves them."""
    env = os.environ if env is None else env
    paths = (str(TESTS), env.get("PYTHONPATH"))
    env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return ProcessPeer(env, prefix, module=module, arguments=arguments)


if __name__ == "__main__":
    serve(PeerCommands(), concurrent=True)
    os._exit(0)  # closes nothing: that a process ends without it is part of the tests
