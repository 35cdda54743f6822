"""`ExpectedPayload`: a small payload of a known layout, opened before its bytes come."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.errors import IntegrityError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.bundle import open_known, open_payload
from omni_kvlink.payload.digests import verify as verify_digests
from omni_kvlink.payload.layout_cache import KnownHeader
from omni_kvlink.payload.manifest import is_simple, quote_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.manifest import Layout, Manifest


class ExpectedPayload:
    """A payload that a reader waits for, and that is likely to have the layout of earlier ones.

    Its views take longer than all else that a small payload needs once its bytes are here. So they
    are made of empty memory before the reader sleeps.

    Attributes:
        data: the payload as views of its memory, after `open`.
        is_covered: whether its tensors have digests, after `open`.
        header: its header, which keeps no view; None until it was filled.
    """

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
        views_of: Callable[[Manifest, Region], Payload] | None = None,
    ):
        self._layout, self._request_id, self._views_of = layout, request_id, views_of

    @property
    def plan(self) -> Manifest:
        """Its manifest without digests."""
        return self._layout.plan(self._request_id)

    def open(self) -> None:
        """Make the memory and the views; called once."""
        layout, request_id = self._layout, self._request_id
        if not is_simple(request_id):
            return  # the layout does not read its header
        quoted_id, self.is_covered = quote_id(request_id), layout.is_covered
        header_nbytes = self._header_nbytes = layout.header_nbytes(len(quoted_id))
        nbytes = header_nbytes + layout.data_nbytes
        region = self._region = Region.private(nbytes)
        if (packed := layout.packed) is not None:
            self._is_packed = partial(
                packed.is_packed, region.address, nbytes, header_nbytes, quoted_id
            )
        if self._views_of is None and layout.kind:
            header = KnownHeader(request_id, layout, b"", header_nbytes, layout.tensors)
            self.data = open_known(header, region)
        else:
            views_of = self._views_of or open_payload
            try:
                self.data = views_of(self.plan, region)
            except WireError:
                return  # the last ones were of another kind
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
        layout, nbytes = self._layout, self._header_nbytes
        text = bytes(payload[8:nbytes])
        self.header = KnownHeader(self._request_id, layout, text, nbytes, layout.tensors)
        self._region.readonly = True
        return self._region

    def discard(self) -> None:
        """Forget the payload that was filled in: what comes next is another one."""
        self.header = None

    def _is_as_expected(self, *, digests: bool) -> bool:
        """Whether the payload is as expected, as `_is_packed` tells, without the native library."""
        region = self._region
        text = region.read(8, self._header_nbytes)
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
