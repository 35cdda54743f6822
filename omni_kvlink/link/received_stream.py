"""A cache that is received while it is being written, layer by layer."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    WireError,
    format_seconds,
)
from omni_kvlink.link.end_metadata import extra_of
from omni_kvlink.link.read_block import ReadBlock, scatter_delivery
from omni_kvlink.payload.bundle import Payload, open_payload
from omni_kvlink.payload.schema import KVMetadata
from omni_kvlink.payload.tensor_memory import payload_views
from omni_kvlink.payload.views import TensorView
from omni_kvlink.system.waits import Answer, check_timeout
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.progress import Progress
    from omni_kvlink.copier import Copier, StreamEvents
    from omni_kvlink.link.end import LinkEnd
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

LayerKey: TypeAlias = tuple[str, int]
"""A layer's branch and index."""


class ReceivedLayer:
    """Layer `index` of the cache `branch` of a bundle ("kv" for a single cache) that arrived."""

    def __init__(self, stream: ReceivedStream, manifest: Manifest, branch: str, index: int):
        self.branch, self.index = branch, index
        self._stream, self._manifest = stream, manifest
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """K and V `[tokens, kv_heads, head_dim]`, or one latent: readonly views."""
        # No cached_property: before Python 3.12 all objects share its lock, and a child that was
        # forked while a thread held it would wait for ever.
        if self._tensors is None:
            region, manifest = self._stream.delivery.open_region(), self._manifest
            self._tensors = tuple(payload_views(region, manifest))
        return self._tensors

    @property
    def key(self) -> torch.Tensor:
        """K; in layout "ND" the latent."""
        return self.tensors[0]

    @property
    def value(self) -> torch.Tensor:
        """V; in layout "ND" there is none, and this is an IndexError."""
        return self.tensors[1]

    def scatter(self, *targets: TensorView) -> None:
        """Copy K and V out into the caller's tensors or paged tensors; see `Received.scatter`."""
        self._stream.scatter(self._manifest, targets)

    def begin_scatter(
        self, *targets: TensorView, rows: range | None = None, after: StreamEvents | None = None
    ) -> StreamEvents:
        """Start what `scatter` does, and return before a device has written its tensors.

        Digests are checked, and tensors of the host written, on return. Those of a device are
        written behind the calling thread's current stream, or behind `after`, which
        `KVConsumer.record` returned for them. Keep the result until the end of these copies, which
        it is: `wait` for it, or let the streams that use the tensors wait (`make_streams_wait`).

        With `rows`, only these tokens are copied; the digests of all are checked.
        """
        return self._stream.begin_scatter(self._manifest, targets, rows, after)

    def __repr__(self) -> str:
        return f"<ReceivedLayer {self.index} of {self.branch!r}>"


class ReceivedStream(ReadBlock):
    """A cache whose layers can be used as they arrive; iterate over it, or wait for one.

    It counts as read once every layer was taken, or `wait` has returned, or when `release` says so;
    one that is left before goes to another reader. Without a `with` block, it is released with the
    last view. `manifest` has digests once the payload is whole; `ledger` is what the receipt of it
    cost on this side.
    """

    WHOLE: ClassVar[str] = "its commit"

    def __init__(
        self,
        delivery: Delivery,
        copier: Copier,
        layouts: LayoutCache,
        *,
        timeout: float,
        started: float,
    ):
        self.delivery, self.ledger = delivery, Ledger()
        self._copier, self.timeout = copier, check_timeout(timeout)
        self._awaited: dict[Future[None], Answer[None]] = {}
        self._is_reported = False  # to the observers, as received or failed
        self.ledger.seconds["wait"] = time.perf_counter() - started
        try:
            self.manifest = delivery.open_manifest(delivery.open_region(), layouts)
            self.ledger.nbytes, self.ledger.copies = self.manifest.nbytes, delivery.copies
            self.ledger.digests = "crc32c" if self.manifest.has_digests else "off"
            self.ledger.path = delivery.path
            layers = self.manifest.layers()
            self._layers = {(branch.name, layer): tensors for branch, layer, tensors in layers}
            self._untaken: set[LayerKey] | None = set(self._layers)  # None: it was taken to its end
        except BaseException as error:
            delivery.end_after(error)
            self._report(error)
            raise
        if observers.registered:
            observers.opened(delivery.scheme, self.ledger.seconds, self.manifest)

    @property
    def metadata(self) -> Mapping[str, KVMetadata | Mapping[str, Any]]:
        """Metadata that `stream_put` gave for each branch ("kv" is a single cache), from the start.

        Of a branch of other tensors it is their JSON metadata.
        """
        return MappingProxyType(
            {
                branch.name: KVMetadata.from_branch(branch)
                if branch.tree is None
                else MappingProxyType(branch.extra)
                for branch in self.manifest.branches
            }
        )

    @property
    def extra(self) -> Mapping[str, Any]:
        """Metadata that `PutStream.finish` was given; empty before the commit, and if none was.

        It is there once `wait` has returned. WireError if it is no JSON object.
        """
        return extra_of(self.delivery)

    @property
    def payload(self) -> Payload:
        """The data that `wait` returns, as views; of a layer that has not come, the bytes are not.

        For its metadata, names, shapes and dtypes.
        """
        return open_payload(self.manifest, self.delivery.open_region())

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
        """Wait for one layer, by its index from 0; in any order, as often as you like.

        `branch`, a cache of a bundle, may be left out of a single cache; `timeout` (seconds) is
        that of the stream if None.

        Raises:
            TransferFailed: the producer failed before the payload was whole.
            TransferTimeout: the layer was not written in time.
            PeerLostError: the producer died, or closed the link.
            WireError: what was announced is not what the plan says.
            SchemaError: there is no such layer.
        """
        key, started = self.find(layer, branch), time.perf_counter()
        self._wait(self._answer(key), self.name(key), timeout)
        if observers.registered:
            observers.layer(self.delivery, "arrived", started, key, self.manifest)
        return self.open_layer(key)

    def wait(self, *, timeout: float | None = None) -> Payload:
        """Wait as `wait_for_layer` does, but for the commit; the data that `get` gives."""
        self._wait(self._answer(None), self.WHOLE, timeout)
        progress = self.delivery.progress
        if progress is not None:  # all tensors must have been announced; take their digests over
            numbers = range(len(self.manifest.tensors))
            announced = progress.when(numbers)
            self._check(announced.is_set(), announced.error, self.WHOLE, 0.0)
            self.manifest = self._with_digests(self.manifest, numbers)
        payload = self.payload
        self._mark_taken()
        return payload

    def __repr__(self) -> str:
        untaken, key = self._untaken or (), self.delivery.key
        return f"<ReceivedStream {key!r}: {len(self) - len(untaken)} of {len(self)} layers taken>"

    def release(self) -> None:
        """Release the payload as read; tensors that are kept elsewhere keep its memory.

        A reader that needs some of the layers only calls this when it has them.
        """
        if observers.registered:
            self._report()
        self.delivery.release()

    def release_unread(self) -> None:
        """Release the payload so that another reader receives it."""
        if observers.registered:
            self._report(ClosedError(f"payload {self.delivery.key!r} was left unread"))
        self.delivery.release_unread()

    def interrupt(self, error: KVLinkError) -> None:
        """End the waits for layers of a payload that is being written, and later ones; any thread.

        Each raises a copy of this error; a layer that is being copied is copied to its end.
        """
        if self.delivery.progress is not None:
            self.delivery.progress.fail(error)

    def __enter__(self) -> ReceivedStream:
        return self

    @property
    def _is_taken(self) -> bool:
        """Whether every layer was taken, or the whole."""
        return self._untaken is None

    def _mark_taken(self) -> None:
        self._untaken = None
        self.delivery.mark_read()
        if observers.registered:
            self._report()

    def _report(self, error: BaseException | None = None) -> None:
        """Tell the observers, once, that all has arrived, or that it will not."""
        if self._is_reported:
            return
        self._is_reported, end, seconds = True, self.delivery, dict(self.ledger.seconds)
        if error is not None:
            parts = end.scheme, end.key, error, seconds["wait"]
            observers.get_failed(*parts, vars(self).get("manifest"))
        else:
            manifest = self.manifest
            done = end.scheme, end.key, manifest.nbytes, seconds
            observers.received(*done, manifest, manifest, end.copies)

    # For event loops: find a layer, wait for its future, check the future, open the layer.

    def find(self, layer: int, branch: str) -> LayerKey:
        """The key of a layer; SchemaError if there is none."""
        if not branch and self.manifest.bundle:
            raise SchemaError("which branch of the bundle? wait_for_layer(…, branch=name)")
        key = (branch or self.manifest.branches[0].name, layer)
        if key not in self._layers:
            raise SchemaError(f"payload {self.delivery.key!r} has no layer {layer!r} of {key[0]!r}")
        return key

    def name(self, key: LayerKey) -> str:
        """A layer's name in error texts."""
        return f"layer {key[1]} of branch {key[0]!r}"

    def numbers(self, key: LayerKey) -> range:
        """The numbers of a layer's tensors in the manifest."""
        return self._layers[key]

    def names(self) -> list[LayerKey]:
        """Branch and index of every layer, in the order of the wire."""
        return list(self._layers)

    def when(self, key: LayerKey) -> Future[None]:
        """A future that ends with the layer, or with the error."""
        return self._future(self._answer(key))

    def whole(self) -> Future[None]:
        """A future that ends with the commit, or with the error."""
        return self._future(self._answer(None))

    def open_layer(self, key: LayerKey) -> ReceivedLayer:
        """A layer whose future has ended well."""
        tensors = self._layers[key]
        manifest = self._with_digests(self.manifest.part(tensors), tensors)
        layer = ReceivedLayer(self, manifest, *key)
        if self._untaken is not None:
            self._untaken.discard(key)
            if not self._untaken:
                self._mark_taken()
        return layer

    def check(self, future: Future[None], subject: str, waited: float) -> None:
        """Raise the error that a future ended with, or TransferTimeout if it did not end."""
        is_ended = future.done()
        self._check(is_ended, future.exception() if is_ended else None, subject, waited)

    def cancel_wait(self, future: Future[None]) -> None:
        """Cancel a wait for this future; it may be ended already."""
        self._cancel_wait(self._awaited.pop(future))

    def _future(self, answer: Answer[None]) -> Future[None]:
        future = answer.future()
        self._awaited[future] = answer
        return future

    def _answer(self, key: LayerKey | None) -> Answer[None]:
        """Return what is set with a layer, with None the commit, or with the error."""
        self.delivery.check_process()
        progress = self.delivery.progress
        if progress is not None:
            return progress.whole if key is None else progress.when(self._layers[key])
        answer: Answer[None] = Answer()
        answer.set_result(None)
        return answer

    def _check(
        self, is_ended: bool, error: BaseException | None, subject: str, waited: float
    ) -> None:
        if not is_ended:
            raise TransferTimeout(
                f"payload {self.delivery.key!r}: {subject} did not come "
                f"within {format_seconds(waited)}",
                key=self.delivery.key,
                waited=waited,
                phase=f"announced; the producer is still writing {subject}",
            )
        if isinstance(error, KVLinkError):
            self._report(error)
            raise self._copy_of(error, subject)

    def _cancel_wait(self, answer: Answer[None]) -> None:
        if self.delivery.progress is not None:
            self.delivery.progress.cancel(answer)

    def scatter(self, manifest: Manifest, targets: Sequence[TensorView]) -> None:
        """Copy the tensors of one layer out; see `ReceivedLayer.scatter`."""
        copier = self._copier
        scatter_delivery(
            copier,
            self.delivery,
            self.ledger,
            lambda region: copier.scatter(manifest, region, targets),
            manifest.tensors[0].name,
        )

    def begin_scatter(
        self,
        manifest: Manifest,
        targets: Sequence[TensorView],
        rows: range | None,
        after: StreamEvents | None,
    ) -> StreamEvents:
        """Start to copy the tensors of one layer out; see `ReceivedLayer.begin_scatter`."""
        copier = self._copier

        def begin(region: Region) -> StreamEvents:
            part = manifest
            if rows is not None:
                copier.verify(manifest, region)
                part = manifest.only(spec.rows(rows) for spec in manifest.tensors)
            return copier.begin_scatter(part, region, targets, after=after)

        layer = manifest.tensors[0].name
        return scatter_delivery(copier, self.delivery, self.ledger, begin, layer)

    def _copy_of(self, error: KVLinkError, subject: str) -> KVLinkError:
        """A new error of the same type: the future's own keeps this stream by its traceback."""
        text = f"{error}; {subject} was awaited"
        if isinstance(error, WireError):
            self.delivery.reject(text)
        if isinstance(error, TransferFailed):
            return TransferFailed(text, key=self.delivery.key, reason=error.reason)
        return type(error)(text)

    def _wait(self, answer: Answer[None], subject: str, timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        started = time.perf_counter()
        try:
            answer.wait(seconds)
        finally:
            self._cancel_wait(answer)
        self._check(answer.is_set(), answer.error, subject, seconds)
        spent = self.ledger.seconds.get("layers", 0.0)
        self.ledger.seconds["layers"] = spent + time.perf_counter() - started

    def _with_digests(self, manifest: Manifest, tensors: range) -> Manifest:
        """The announced digests, each as long as the plan says."""
        progress: Progress | None = self.delivery.progress
        if progress is None:
            return manifest
        digests = [progress.digest(tensor).hex() for tensor in tensors]
        for digest, spec in zip(digests, manifest.tensors, strict=True):
            if len(digest) != len(spec.digest):
                self.delivery.reject(f"{spec.where()}: a digest of another length")
                raise WireError(f"{spec.where()}: a digest of another length was announced")
        return manifest.with_digests(digests)


def open_stream(
    consumer: LinkEnd, delivery: Delivery, *, started: float, timeout: float
) -> ReceivedStream:
    """`open_delivery` for `begin_get(…, streamed=True)`; `timeout` seconds for each layer."""
    copier, layouts = consumer._copier, consumer._layouts
    return ReceivedStream(delivery, copier, layouts, timeout=timeout, started=started)
