"""A payload that is received while it is being written: one layer after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cached_property
from typing import ClassVar

import torch

from omni_kvlink.connectors.base import Delivery
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.copier import Copier
from omni_kvlink.errors import KVLinkError, SchemaError, TransferFailed, TransferTimeout, WireError
from omni_kvlink.link.received import Payload, manifest_of, region_of, scatter
from omni_kvlink.payload.branch import Branch
from omni_kvlink.payload.dtypes import tensor_views
from omni_kvlink.payload.files import open_payload
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.views import TensorView

Key = tuple[str, int]


class ReceivedLayer:
    """One layer that arrived.

    Attributes:
        branch: the cache's name in its bundle; "kv" for a single cache.
        index: of the layer, from 0.
    """

    def __init__(self, stream: ReceivedStream, manifest: Manifest, branch: str, index: int):
        self.branch, self.index = branch, index
        self._stream, self._manifest = stream, manifest

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """K and V `[tokens, kv_heads, head_dim]`, or one latent: readonly views."""
        region = region_of(self._stream.delivery)
        return tuple(tensor_views(region, self._manifest.tensors, self._manifest.header_nbytes))

    @property
    def key(self) -> torch.Tensor:
        """K; in layout "ND" the latent."""
        return self.tensors[0]

    @property
    def value(self) -> torch.Tensor:
        """V; in layout "ND" there is none, and this is an IndexError."""
        return self.tensors[1]

    def scatter(self, *places: TensorView) -> None:
        """Copy K and V out into tensors or pages of yours; see `Received.scatter`."""
        self._stream.scatter(self._manifest, places)

    def __repr__(self) -> str:
        return f"<ReceivedLayer {self.index} of {self.branch!r}>"


class ReceivedStream:
    """A cache whose layers can be used as they come; iterate over it, or wait for one.

    A context manager; without the block, the payload is given back when the last view is gone.

    Attributes:
        manifest: sizes and positions; with digests once the payload is whole.
        ledger: what the receipt of it cost on this side.
        timeout: seconds to wait for a layer, where no other is given.
    """

    WHOLE: ClassVar = "its commit"

    def __init__(self, delivery: Delivery, copier: Copier, *, timeout: float, started: float):
        self.delivery, self.ledger = delivery, Ledger()
        self._copier, self.timeout = copier, timeout
        self.ledger.seconds["wait"] = time.perf_counter() - started
        try:
            region = region_of(delivery)
            header = delivery.draft or region.view()
            self.manifest = manifest_of(delivery.key, header, region.nbytes)
        except BaseException as error:
            delivery.reject(str(error) or repr(error))
            raise
        self.ledger.nbytes, self.ledger.copies = self.manifest.nbytes, delivery.copies
        self.ledger.digests = "crc32c" if self.manifest.has_digests else "off"
        self._layers: dict[Key, tuple[Branch, range]] = {
            (branch.name, layer): (branch, tensors)
            for branch, layer, tensors in self.manifest.layers()
        }

    def __len__(self) -> int:
        """Layers of all branches together."""
        return len(self._layers)

    def __iter__(self) -> Iterator[ReceivedLayer]:
        """The layers in the order of the wire; waits up to the stream's timeout for each."""
        for branch, layer in self._layers:
            yield self.wait_for_layer(layer, branch=branch)

    def wait_for_layer(
        self, layer: int, *, branch: str = "", timeout: float | None = None
    ) -> ReceivedLayer:
        """One layer, as soon as it is there; in any order, as often as you like.

        Args:
            branch: which cache of a bundle; may be left out of a single cache.
            timeout: seconds; that of the stream if None.

        Raises:
            TransferFailed: the producer failed before the payload was whole.
            TransferTimeout, PeerLostError, WireError
            SchemaError: there is no such layer.
        """
        key = self.find(layer, branch)
        self._wait(self.when(key), self.name(key), timeout)
        return self.open_layer(key)

    def wait(self, *, timeout: float | None = None) -> Payload:
        """The whole payload, when it is committed: the data that `get` gives.

        Raises:
            The errors of `wait_for_layer`.
        """
        self._wait(self.whole(), self.WHOLE, timeout)
        if self.delivery.progress is not None:
            self._settle(self.delivery.progress)
        return open_payload(self.manifest, region_of(self.delivery))

    def release(self) -> None:
        """Let go of the payload; tensors that are kept elsewhere keep its memory."""
        self.delivery.drop()

    def __enter__(self) -> ReceivedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    # For asyncio users, and for the layers

    def find(self, layer: int, branch: str) -> Key:
        if not branch and self.manifest.bundle:
            raise SchemaError("which branch of the bundle? wait_for_layer(…, branch=name)")
        key = (branch or self.manifest.branches[0].name, layer)
        if key not in self._layers:
            raise SchemaError(f"payload {self.delivery.key!r} has no layer {layer} of {key[0]!r}")
        return key

    def name(self, key: Key) -> str:
        """A layer in words."""
        return f"layer {key[1]} of branch {key[0]!r}"

    def names(self) -> list[Key]:
        """Branch and index of every layer, in the order of the wire."""
        return list(self._layers)

    def when(self, key: Key) -> Future[None]:
        """A future that ends with the layer, or with the error."""
        progress = self.delivery.progress
        return _there() if progress is None else progress.when(self._layers[key][1])

    def whole(self) -> Future[None]:
        """A future that ends with the commit, or with the error."""
        progress = self.delivery.progress
        return _there() if progress is None else progress.whole

    def open_layer(self, key: Key) -> ReceivedLayer:
        """A layer that is there."""
        tensors = self._layers[key][1]
        manifest = self._with_digests(self.manifest.part(tensors), tensors)
        return ReceivedLayer(self, manifest, *key)

    def scatter(self, manifest: Manifest, places: Sequence[TensorView]) -> None:
        scatter(self._copier, manifest, self.delivery, places, self.ledger)

    def check(self, future: Future[None], what: str, waited: float) -> None:
        """Raise what it ended with, or that it did not end."""
        if not future.done():
            raise self._timed_out(what, waited)
        error = future.exception()
        if isinstance(error, KVLinkError):
            raise self._failed(error, what)

    def _settle(self, progress: Progress) -> None:
        """It was committed: check that all was announced, and take the digests over."""
        everything = range(len(self.manifest.tensors))
        self.check(progress.when(everything), self.WHOLE, 0.0)
        self.manifest = self._with_digests(self.manifest, everything)

    def _failed(self, error: KVLinkError, what: str) -> KVLinkError:
        """The same error, saying what was waited for; a new one, because raising one that is kept
        would keep this stream, by its traceback, and its memory.
        """
        text = f"{error}; {what} was awaited"
        if isinstance(error, WireError):
            self.delivery.reject(text)
        if isinstance(error, TransferFailed):
            return TransferFailed(text, key=self.delivery.key, reason=error.reason)
        return type(error)(text)

    def forget(self, future: Future[None]) -> None:
        """Nobody waits for it any more."""
        if self.delivery.progress is not None:
            self.delivery.progress.forget(future)

    def _timed_out(self, what: str, waited: float) -> TransferTimeout:
        return TransferTimeout(
            f"payload {self.delivery.key!r}: {what} did not come within {waited:g} s",
            key=self.delivery.key,
            waited=waited,
            phase=f"announced; the producer is still writing {what}",
        )

    def _wait(self, future: Future[None], what: str, timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else timeout
        started = time.perf_counter()
        try:
            future.exception(min(max(0.0, seconds), threading.TIMEOUT_MAX))
        except FutureTimeout:
            pass  # `check` says so
        finally:
            self.forget(future)
        self.check(future, what, seconds)
        spent = self.ledger.seconds.get("layers", 0.0)
        self.ledger.seconds["layers"] = spent + time.perf_counter() - started

    def _with_digests(self, manifest: Manifest, tensors: range) -> Manifest:
        """The announced digests, which must be as many as the plan said."""
        progress = self.delivery.progress
        if progress is None:
            return manifest
        digests = [progress.digest(tensor).hex() for tensor in tensors]
        for digest, spec in zip(digests, manifest.tensors, strict=True):
            if len(digest) != len(spec.digest):
                self.delivery.reject(f"{spec.where()}: a digest of another length")
                raise WireError(f"{spec.where()}: a digest of another length was announced")
        return manifest.with_digests(digests)


def _there() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
