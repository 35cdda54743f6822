"""The only file that knows ucxx. Everything here is for one thread alone."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.errors import PeerLostError, UnavailableError
from omni_kvlink.memory.region import Region

_QUIET = {"UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}


def load() -> tuple[Any, Any]:
    """ucxx's modules; the environment, which ucxx changes as it is imported, is put back.

    A child process shall not inherit it, and UCX complains about it on the standard output.
    What else it says there, such as that a peer is gone, our errors say better.
    """
    before = set(os.environ)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from ucxx._lib import arr, libucxx

    for name in set(os.environ) - before:
        if name.startswith("UCX_"):
            del os.environ[name]
    return libucxx, arr.Array


class UcxArrived(NamedTuple):
    """A message that UCX has not been told where to put; it stays where it is until then."""

    tag: int
    nbytes: int
    handle: Any


class _OnDevice:
    """Memory of a GPU, as UCX takes it."""

    def __init__(self, region: Region):
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _exported(region: Region) -> object:
    if region.device != "cpu":
        return _OnDevice(region)
    # A view of no bytes cannot be cast.
    return region.view() if region.nbytes else bytearray()


class UcxWorker:
    """A UCX worker that can be slept on, with endpoints that notice a peer's death.

    Error handling is always on, for which UCX gives up shared memory between processes.
    """

    def __init__(self, settings: UcxSettings):
        self._ucxx, self._array = load()
        libucxx = self._ucxx
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        try:
            self._context = libucxx.UCXContext(settings.options(), features)
            self._worker = libucxx.UCXWorker(self._context, False, False)
        except libucxx.UCXError as error:
            raise UnavailableError(
                f"UCX has nothing to work with: {error}; transports {settings.transports!r}, "
                f"devices {settings.devices!r}"
            ) from error
        self._worker.init_blocking_progress_mode()
        self.fd: int = self._worker.epoll_file_descriptor
        self.address: bytes = bytes(self._worker.address.tobytes())
        self._any = libucxx.UCXXTag(0), libucxx.UCXXTagMask(0)

    def connect(self, address: bytes) -> Any:
        """An endpoint; raises PeerLostError if UCX sees at once that it leads nowhere."""
        try:
            return self._worker.create_endpoint_from_worker_address(
                self._ucxx.UCXAddress.create_from_buffer(address), True
            )
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot connect: {error}") from error

    def disconnect(self, endpoint: Any) -> None:
        """At once and without a word to the peer; its requests complete with an error."""
        # Not `close`: that one waits for the peer, and a frozen peer never answers.
        endpoint.close_blocking()

    def progress(self) -> None:
        self._worker.progress()

    def arm(self) -> bool:
        """Make `fd` readable when something happens; False if it already has: progress first."""
        return bool(self._worker.arm())

    def arrived(self) -> UcxArrived | None:
        """The next message that waits to be received or discarded, taken from UCX's queue."""
        probe = self._worker.tag_probe(*self._any, True)
        return UcxArrived(probe.sender_tag.value, probe.length, probe) if probe.matched else None

    def send(self, endpoint: Any, array: Any, tag: int) -> Any:
        """A request; raises PeerLostError if the endpoint has just failed."""
        try:
            return endpoint.tag_send(array, self._ucxx.UCXXTag(tag))
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot send: {error}") from error

    def receive(self, endpoint: Any, array: Any, message: UcxArrived) -> Any:
        """A request; raises PeerLostError if the endpoint has just failed."""
        try:
            return endpoint.tag_recv_with_handle(array, message.handle)
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot receive: {error}") from error

    def discard(self, message: UcxArrived) -> Any:
        """Receive nothing of it: UCX throws a longer message away and tells its sender."""
        return self._worker.tag_recv_with_handle(self._array(bytearray()), message.handle)

    def error(self, request: Any) -> str | None:
        """Why a completed request failed, or None."""
        try:
            request.check_error()
        except self._ucxx.UCXError as error:
            return str(error)
        return None

    def array(self, memory: object) -> Any:
        """Memory as UCX takes it, without a copy.

        Args:
            memory: a region, a buffer, or anything with `__cuda_array_interface__`, which UCX
                takes where it has CUDA (not run yet).

        Raises:
            ValueError: it is not contiguous.
        """
        if isinstance(memory, Region):
            memory = _exported(memory)
        array = self._array(memory)
        if not array.c_contiguous:
            raise ValueError("memory with gaps cannot be one message")
        return array

    def facts(self) -> dict[str, Any]:
        """What UCX chose."""
        lines = self._context.info.splitlines()
        return {
            "ucx": ".".join(map(str, self._ucxx.get_ucx_version())),
            "cuda": bool(self._context.cuda_support),
            "devices": [line.split()[-1] for line in lines if "resource" in line],
        }
