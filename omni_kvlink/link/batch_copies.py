"""`BatchCopies`: copies the payloads of a batch out, by two threads where that is sooner."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import CapacityError, KVLinkError, without_frames
from omni_kvlink.payload.bundle import targets_of
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.link.copy_into import Targets
    from omni_kvlink.link.read_block import ReceivedPayload
    from omni_kvlink.payload.views import TensorView

SHARED = 8 << 20
"""Bytes of a batch from which a second thread gains more than its start costs."""


class BatchCopies:
    """The copies of received payloads, each into its targets; an error is that of one payload.

    A second thread shares them if they are large and all targets lie in the host's memory: copies
    from and to a device are ordered behind the streams of the thread that makes them. In the main
    thread there is no second one: an exception of a signal handler could end the wait for it, and
    it would write to targets that their owner uses again.
    """

    def __init__(self, received: Sequence[ReceivedPayload], into: Sequence[Targets]):
        self._errors: list[KVLinkError | None] = [None] * len(received)
        self._remaining: deque[tuple[int, ReceivedPayload, Sequence[TensorView]]] = deque()
        self._fault: BaseException | None = None
        for number, (payload, targets) in enumerate(zip(received, into, strict=True)):
            try:
                self._remaining.append((number, payload, targets_of(payload._data, targets)))
            except KVLinkError as error:  # noqa: PERF203 (it is that of one payload)
                self._errors[number] = without_frames(error)

    def run(self) -> list[KVLinkError | None]:
        """Copy all, and return the errors; any other exception is raised when no thread copies."""
        helper = self._start_helper() if self._are_shared() else None
        try:
            self._copy()
        finally:
            self._remaining.clear()
            if helper is not None:
                helper.join()
        fault, self._fault = self._fault, None
        if fault is not None:
            try:
                raise fault
            finally:
                del fault  # its traceback has this frame
        return self._errors

    def _are_shared(self) -> bool:
        if threading.get_ident() == threading.main_thread().ident or len(self._remaining) < 2:
            return False
        nbytes = 0
        for _, _, views in self._remaining:
            for view in views:
                if not isinstance(view, (torch.Tensor, PagedTensor)) or view.device.type != "cpu":
                    return False
                nbytes += view.nbytes
        return nbytes >= SHARED

    def _start_helper(self) -> threading.Thread | None:
        helper = threading.Thread(target=self._help, name="kvlink-scatter", daemon=True)
        try:
            start_thread(helper)
        except CapacityError:
            return None  # the caller copies all
        return helper

    def _help(self) -> None:
        try:
            self._copy()
        except BaseException as fault:
            self._remaining.clear()
            self._fault = fault

    def _copy(self) -> None:
        while self._remaining:
            try:
                number, payload, views = self._remaining.popleft()
            except IndexError:  # the other thread has taken the last one
                return
            try:
                payload.scatter(views)
            except KVLinkError as error:
                self._errors[number] = without_frames(error)
