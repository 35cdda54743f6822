"""`CopyInto`: copies a payload into the caller's tensors, each layer as soon as it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from omni_kvlink.errors import IntegrityError
from omni_kvlink.payload.bundle import targets_of
from omni_kvlink.payload.overlap import check_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.copier import StreamEvents
    from omni_kvlink.link.received_stream import ReceivedLayer, ReceivedStream
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.views import TensorView


class LayerTargets(NamedTuple):
    """The caller's tensors for one layer of a payload; with `rows`, for these tokens of it."""

    branch: str
    layer: int
    views: Sequence[TensorView]
    rows: range | None = None


Targets: TypeAlias = "Payload | Mapping[str, Any] | Sequence[TensorView]"
"""The caller's tensors; see `Received.scatter`."""
Into: TypeAlias = "Targets | Callable[[ReceivedStream], Targets | Sequence[LayerTargets]]"
"""Targets, or what returns them when the payload's metadata and shapes are known: of all of it, or
the layers that are wanted, in the order in which they are copied."""


class CopyInto:
    """The copies of a payload that may still be written into targets, checked before the first one.

    Each byte is compared with its digest on the way. With `after`, which `KVConsumer.record`
    returned, tensors of a device are written behind it, and `wait` waits for their copies.

    Attributes:
        count: the layers that were copied, or on a device are being copied.
        ends: of the copies on a device that were begun, by layer.

    Raises:
        SchemaError: as `Received.scatter`.
        IntegrityError: verify is "full", and the payload has no digests.
    """

    def __init__(
        self,
        stream: ReceivedStream,
        into: Into,
        *,
        verify: str = "auto",
        after: StreamEvents | None = None,
    ):
        manifest = stream.manifest
        if verify == "full" and not manifest.is_covered:
            raise IntegrityError(
                f"payload {stream.delivery.key!r} has no digests, so that its bytes cannot be "
                'checked: put it with digests=True, or get it with verify="auto"'
            )
        self.stream, self._after = stream, after
        self.count = 0
        self.ends: list[StreamEvents] = []
        self.layers: list[LayerTargets] = []
        self._whole: list[TensorView] | None = None
        found: Any = into(stream) if callable(into) else into
        if _are_layers(found):
            self.layers += found
            return
        targets = targets_of(stream.payload, found)
        views = check_targets(targets, manifest, stream.delivery.open_region())
        if stream.delivery.progress is None and after is None:
            self._whole = views
        for branch, layer in stream.names():
            tensors = stream.numbers((branch, layer))
            own = views[tensors.start : tensors.stop]
            self.layers.append(LayerTargets(branch, layer, own))

    def __repr__(self) -> str:
        return f"<CopyInto: {self.count} of {len(self.layers)} layers>"

    @property
    def is_by_layer(self) -> bool:
        """Whether `copy_layer` is to be called for each of `layers`, or `copy_all` at the end."""
        return self._whole is None

    def copy_layer(self, targets: LayerTargets, layer: ReceivedLayer) -> None:
        """Copy one layer, which is there; of a device, begin it."""
        rows = targets.rows
        if rows is not None and rows == range(layer.tensors[0].shape[0]):
            rows = None
        if self._after is None and rows is None:
            layer.scatter(*targets.views)
        else:
            self.ends.append(layer.begin_scatter(*targets.views, rows=rows, after=self._after))
        self.count += 1

    def copy_all(self) -> None:
        """Copy a payload that came whole."""
        assert self._whole is not None
        self.stream.scatter(self.stream.manifest, self._whole)
        self.count = len(self.layers)

    def run(
        self,
        seconds_left: Callable[[], float],
        copied: Callable[[CopyInto], object] = lambda copies: None,
    ) -> Payload:
        """Copy the layers as they come, and return the payload as views once it is committed.

        `copied` is called before the first layer and after each one; an error that it raises ends
        the copy. Blocks while `seconds_left`; raises what `ReceivedStream.wait_for_layer` does.
        """
        copied(self)
        for targets in self.layers if self.is_by_layer else ():
            branch, limit = targets.branch, seconds_left()
            layer = self.stream.wait_for_layer(targets.layer, branch=branch, timeout=limit)
            self.copy_layer(targets, layer)
            copied(self)
        payload = self.stream.wait(timeout=seconds_left())
        if not self.is_by_layer:
            self.copy_all()
            copied(self)
        return payload

    def wait(self) -> None:
        """Block until no device reads the payload or writes a target any more."""
        for end in self.ends:
            end.wait()


def _are_layers(targets: Any) -> bool:
    is_list = isinstance(targets, list) and bool(targets)
    return is_list and all(isinstance(each, LayerTargets) for each in targets)
