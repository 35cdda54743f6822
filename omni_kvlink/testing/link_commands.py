"""The commands of a conformance peer: consumers' links, and what was received from them."""

from __future__ import annotations

from typing import Any

import torch

from omni_kvlink.link import KVLink
from omni_kvlink.testing.caches import fingerprint, hash_tensors, identify
from omni_kvlink.testing.peer_harness import CommandSet


class LinkCommands(CommandSet):
    """Links by name; `key` is the request id of a payload that one of them has.

    Payloads travel as fingerprints, see `omni_kvlink.testing.caches`. `options` are those of the
    `KVLink` method that the command is named for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, Any] = {}  # a `KVConsumer`; in a subclass also a `KVProducer`
        self.kept: dict[str, Any] = {}
        """A list of tensors, a `ReceivedStream` or a `ChunkStream`, by key, until `release`."""

    def close_all(self) -> None:
        """Release every payload, close every link."""
        self.release_all()
        for link in list(self._links):
            self.remove(link)

    def connect(self, link: str, url: str, **options: Any) -> None:
        """Make a consumer's link; blocks until it is connected."""
        self._links[link] = KVLink.connect(url, **options)

    def get(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload and release it; its fingerprint."""
        with self._links[link].get(key, **options) as data:
            return fingerprint(data)

    def get_path(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload and release it; the path of its ledger."""
        received = self._links[link].get(key, **options)
        with received:
            return str(received.ledger.path)

    def contains(self, link: str, keys: list[str], **options: Any) -> list[bool]:
        """Whether the producer has each of these keys now."""
        return list(self._links[link].contains(keys, **options))

    def get_many(self, link: str, keys: list[str], **options: Any) -> list[str]:
        """Receive several payloads together and release them; their fingerprints."""
        with self._links[link].get_many(keys, **options) as payloads:
            return list(map(fingerprint, payloads))

    def hold(self, link: str, key: str, **options: Any) -> str:
        """Receive a payload, and keep its tensors beyond the `with` block; its fingerprint."""
        with self._links[link].get(key, **options) as data:
            self.kept[key] = list(data.tensors())
            return fingerprint(data)

    def hash_held(self, key: str) -> str:
        """The hash of the tensors that `hold` kept, as they are now."""
        return hash_tensors(self.kept[key])

    def release_one(self, key: str) -> int:
        """Drop one tensor that `hold` kept; the number of those left."""
        self.kept[key].pop()
        return len(self.kept[key])

    def stream_get(self, link: str, key: str, **options: Any) -> list[list[Any]]:
        """Wait until a stream begins, and keep it; the names of its layers."""
        stream = self.kept[key] = self._links[link].stream_get(key, **options)
        return list(map(list, stream.names()))

    def wait_layer(self, key: str, layer: int, **options: Any) -> str:
        """Wait for one layer of a stream; the hash of its tensors."""
        return hash_tensors(self.kept[key].wait_for_layer(layer, **options).tensors)

    def scatter_layer(self, key: str, layer: int, **options: Any) -> str:
        """Wait for one layer of a stream and copy it out; the hash of the copies."""
        received = self.kept[key].wait_for_layer(layer, **options)
        targets = [torch.zeros_like(tensor) for tensor in received.tensors]
        received.scatter(*targets)
        return hash_tensors(targets)

    def wait_stream(self, key: str, timeout: float | None = None) -> str:
        """Wait for a stream's commit; the fingerprint of its payload."""
        return fingerprint(self.kept[key].wait(timeout=timeout))

    def stream_metadata(self, key: str) -> list[dict[str, Any]]:
        """The lengths of each branch of a stream by its metadata, and the metadata at its end."""
        stream = self.kept[key]
        lens = {name: getattr(each, "kv_lens", ()) for name, each in stream.metadata.items()}
        return [lens, dict(stream.extra)]

    def get_extra(self, link: str, key: str, **options: Any) -> dict[str, Any]:
        """Receive a payload and release it; return the metadata that its stream ended with."""
        received = self._links[link].get(key, **options)
        with received:
            return dict(received.extra)

    def read_stream(self, link: str, key: str, **options: Any) -> None:
        """Wait until an append stream is opened, and keep it for `receive`."""
        self.kept[key] = self._links[link].read_stream(key, **options)

    def receive(self, key: str, timeout: float | None = None) -> tuple[int, str] | None:
        """Receive a chunk: its number and the hash of its tensors; None at the end."""
        received = self.kept[key].receive(timeout=timeout)
        return None if received is None else identify(received)

    def receive_all(self, key: str) -> list[tuple[int, str]]:
        """Receive the chunks that are left; the number of each and the hash of its tensors."""
        return [identify(received) for received in self.kept[key]]

    def release(self, key: str) -> None:
        """Release what `hold`, `stream_get` or `read_stream` kept, if anything."""
        kept = self.kept.pop(key, None)
        if not isinstance(kept, (list, type(None))):
            kept.release()

    def release_all(self) -> None:
        """Release all that is kept."""
        for key in list(self.kept):
            self.release(key)

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
