"""`ExpectedPayload`: a small payload of a known layout, opened before its bytes come."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.errors import IntegrityError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.bundle import open_payload
from omni_kvlink.payload.digests import verify as verify_digests
from omni_kvlink.payload.manifest import KnownHeader, is_simple, quote_id

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
        header: its header, which keeps no view; None until it was filled.
    """

    plan: Manifest
    data: Payload
    is_covered: bool
    header: KnownHeader | None = None
    _view: memoryview | None = None
    _is_packed: Callable[..., bool] | None = None
    """Whether the memory holds the payload, and with `digests` as its digests say."""

    def __init__(
        self,
        layout: Layout,
        request_id: str,
        views_of: Callable[[Manifest, Region], Payload] = open_payload,
    ):
        self._layout, self._request_id, self._views_of = layout, request_id, views_of

    def open(self) -> None:
        """Make the memory and the views; called once."""
        if not is_simple(self._request_id):
            return  # the layout does not read its header
        self.plan = self._layout.plan(self._request_id)
        self.is_covered = self.plan.is_covered
        region = self._region = Region.private(self.plan.nbytes)
        packed, sizes = self._layout.packed, (self.plan.nbytes, self.plan.header_nbytes)
        if packed is not None:
            quoted_id = quote_id(self._request_id)
            self._is_packed = partial(packed.is_packed, region.address, *sizes, quoted_id)
        with contextlib.suppress(WireError):  # the last ones were of another kind
            self.data = self._views_of(self.plan, region)
            self._view = region.view()

    def fill(self, payload: memoryview, *, verify: bool) -> Region | None:
        """Copy a payload that came to the memory, which is returned; called once.

        None if it is not as expected, or `open` was not called: nothing of it was checked then.
        With `verify`, each byte of its tensors is compared with its digest, too.
        """
        view, self._view = self._view, None
        if view is None or payload.nbytes != len(view):
            return None
        view[:] = payload
        if not (self._is_packed or self._is_as_expected)(digests=verify):
            return None
        text = bytes(payload[8 : self.plan.header_nbytes])
        layout, nbytes = self._layout, self.plan.header_nbytes
        self.header = KnownHeader(self._request_id, layout, text, nbytes, layout.tensors)
        self._region.readonly = True
        return self._region

    def discard(self) -> None:
        """Forget the payload that was filled in: what comes next is another one."""
        self.header = None

    def _is_as_expected(self, *, digests: bool) -> bool:
        """Whether the payload is as expected, as `_is_packed` tells, without the native library."""
        region = self._region
        text = region.read(8, self.plan.header_nbytes)
        if int.from_bytes(region.read(0, 8), "little") != len(text):
            return False
        if self._layout.match(text, region.nbytes) != self._request_id:
            return False
        if digests:
            try:
                verify_digests(self._layout.manifest(self._request_id, text), region)
            except IntegrityError:
                return False
        return True
