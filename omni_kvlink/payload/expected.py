"""`ExpectedPayload`: a small payload of a known layout, opened before its bytes come."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.errors import IntegrityError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload import digests
from omni_kvlink.payload.bundle import open_payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.manifest import Layout, Manifest


class ExpectedPayload:
    """A payload that a reader waits for, and that is likely to have the layout of earlier ones.

    Its views take longer than all else that a small payload needs once its bytes are here. So they
    are made of empty memory before the reader sleeps.

    Attributes:
        plan: its manifest without digests, after `open`.
        data: the payload as views of its memory, after `open`.
        is_covered: whether its tensors have digests, after `open`.
        make_manifest: makes its manifest, and keeps no view; None until it was filled.
    """

    plan: Manifest
    data: Payload
    is_covered: bool
    make_manifest: Callable[[], Manifest] | None = None
    _view: memoryview | None = None

    def __init__(
        self,
        layout: Layout,
        request_id: str,
        views_of: Callable[[Manifest, Region], Payload] = open_payload,
    ):
        self._layout, self._request_id, self._views_of = layout, request_id, views_of

    def open(self) -> None:
        """Make the memory and the views; called once."""
        self.plan = self._layout.plan(self._request_id)
        self.is_covered = self.plan.is_covered
        self._region = Region.private(self.plan.nbytes)
        with contextlib.suppress(WireError):  # the last ones were of another kind
            self.data = self._views_of(self.plan, self._region)
            self._view = self._region.view()

    def fill(self, payload: memoryview, *, verify: bool) -> Region | None:
        """Copy a payload that came to the memory, which is returned; called once.

        None if it is not as expected, or `open` was not called: nothing of it was checked then.
        With `verify`, each byte of its tensors is compared with its digest, too.
        """
        view, self._view = self._view, None
        if view is None or payload.nbytes != len(view):
            return None
        text = bytes(payload[8 : self.plan.header_nbytes])
        if int.from_bytes(payload[:8], "little") != len(text):
            return None
        if not self._layout.is_header(text, self._request_id):
            return None
        view[:] = payload
        if verify and not self._is_as_committed(text):
            return None
        self._region.readonly = True
        self.make_manifest = partial(_manifest, self._layout, text, payload.nbytes)
        return self._region

    def discard(self) -> None:
        """Forget the payload that was filled in: what comes next is another one."""
        self.make_manifest = None

    def _is_as_committed(self, text: bytes) -> bool:
        """Whether the tensors in the memory are as the digests of this header say."""
        region, packed = self._region, self._layout.packed
        if packed is not None:
            return packed.verify(region.address, region.nbytes, self.plan.header_nbytes)
        try:
            digests.verify(_manifest(self._layout, text, region.nbytes), region)
        except IntegrityError:
            return False
        return True


def _manifest(layout: Layout, text: bytes, nbytes: int) -> Manifest:
    manifest = layout.match(text, nbytes)
    assert manifest is not None  # the text was compared with the layout
    return manifest
