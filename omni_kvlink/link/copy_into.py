"""`CopyInto`: copies a payload into the caller's tensors, each layer as soon as it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.errors import IntegrityError
from omni_kvlink.payload.bundle import open_payload, targets_of
from omni_kvlink.payload.overlap import check_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.link.received_stream import LayerKey, ReceivedStream
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.views import TensorView
    from omni_kvlink.system.waits import Deadline

Targets: TypeAlias = "Payload | Mapping[str, Any] | Sequence[TensorView]"
"""The caller's tensors; see `Received.scatter`."""


class CopyInto:
    """The targets of a payload that may still be written, checked before a byte is copied.

    SchemaError as of `Received.scatter`. With `verify="full"`, IntegrityError if the payload has no
    digests; each byte is compared with its digest while it is copied in any case.
    """

    def __init__(self, stream: ReceivedStream, into: Targets, verify: str):
        manifest, region = stream.manifest, stream.delivery.open_region()
        if verify == "full" and not manifest.is_covered:
            raise IntegrityError(
                f"payload {stream.delivery.key!r} has no digests, so that its bytes cannot be "
                'checked: put it with digests=True, or get it with verify="auto"'
            )
        self._stream = stream
        targets = targets_of(open_payload(manifest, region), into)
        self._targets = check_targets(targets, manifest, region)

    @property
    def is_by_layer(self) -> bool:
        """Whether the payload was still being written when it was offered."""
        return self._stream.delivery.progress is not None

    def copy_layer(self, key: LayerKey) -> None:
        """Copy one layer, which is there."""
        numbers = self._stream.numbers(key)
        self._stream.open_layer(key).scatter(*self._targets[numbers.start : numbers.stop])

    def copy_all(self) -> None:
        """Copy a payload that came whole."""
        self._stream.scatter(self._stream.manifest, self._targets)


def copy_into(stream: ReceivedStream, into: Targets, deadline: Deadline, verify: str) -> Payload:
    """Copy the payload of a stream into the caller's tensors, and return it as views.

    Blocks until the deadline.
    """
    copies = CopyInto(stream, into, verify)
    for branch, layer in stream.names() if copies.is_by_layer else ():
        stream.wait_for_layer(layer, branch=branch, timeout=deadline.seconds_left())
        copies.copy_layer((branch, layer))
    payload = stream.wait(timeout=deadline.seconds_left())
    if not copies.is_by_layer:
        copies.copy_all()
    return payload
