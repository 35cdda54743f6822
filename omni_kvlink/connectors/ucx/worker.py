"""The wrapper of ucxx; no other module uses it. Objects of this module belong to one thread."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.errors import PeerLostError, UnavailableError
from omni_kvlink.memory.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.ucx.settings import UcxSettings

_is_used = _was_forked = False


def forked_child() -> str:
    """Return why UCX cannot be used in this process, a forked child of one that used it; or ""."""
    cure = "start this process by spawn: multiprocessing.get_context('spawn')"
    return f"UCX was used before this process was forked, and hangs in it; {cure}" * _was_forked


def _after_fork() -> None:
    global _was_forked
    _was_forked = _is_used


os.register_at_fork(after_in_child=_after_fork)

_LOG_SETTINGS = {"UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}


def load() -> tuple[Any, Any]:
    """Import ucxx; return the module `ucxx._lib.libucxx` and the class `ucxx._lib.arr.Array`.

    The environment variables that the import sets are restored: a child process must not inherit
    them. UCX logs to the standard output, also what this package reports as errors (a peer is
    gone); only fatal messages are logged, to the standard error.
    """
    before = set(os.environ)
    for name, value in _LOG_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Not at the top: ucxx is an optional package, and its import changes the process.
    from ucxx._lib import arr, libucxx

    for name in set(os.environ) - before:
        if name.startswith("UCX_"):
            del os.environ[name]
    return libucxx, arr.Array


def reaches_cuda(settings: UcxSettings) -> bool:
    """Whether UCX, as it is installed and set up, accepts memory of a GPU."""
    return bool(_open_context(load()[0], settings).cuda_support)


def _open_context(libucxx: Any, settings: UcxSettings) -> Any:
    """Return a UCX context with these settings; UnavailableError if they leave it nothing."""
    global _is_used
    _is_used = True
    features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
    try:
        return libucxx.UCXContext(settings.options(), features)
    except libucxx.UCXError as error:
        raise _nothing(settings, error) from error


def _nothing(settings: UcxSettings, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"UCX has nothing to work with: {error}; transports {settings.transports!r}, "
        f"devices {settings.devices!r}"
    )


class UcxMessage(NamedTuple):
    """A message that has arrived, and stays in UCX until it is received or discarded."""

    tag: int
    nbytes: int
    handle: Any


class _CudaMemory:
    """GPU memory in the form that UCX takes."""

    def __init__(self, region: Region):
        self._region, shape, data = region, (region.nbytes,), (region.address, False)
        form = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}
        self.__cuda_array_interface__ = form


class UcxWorker:
    """A UCX worker with a descriptor to sleep on, and endpoints that detect a peer's death.

    UCX uses no shared memory between processes, because endpoints with error handling exclude it.
    """

    def __init__(self, settings: UcxSettings):
        self._ucxx, self._array = load()
        libucxx = self._ucxx
        self._context = _open_context(libucxx, settings)
        try:
            self._worker = libucxx.UCXWorker(self._context, False, False)
        except libucxx.UCXError as error:
            raise _nothing(settings, error) from error
        self._worker.init_blocking_progress_mode()
        self.fd: int = self._worker.epoll_file_descriptor
        self.address: bytes = bytes(self._worker.address.tobytes())
        # Does all work that can be done now.
        self.progress: Callable[[], None] = self._worker.progress
        # Makes `fd` readable at the next event; returns False if `progress` must be called first.
        self.arm: Callable[[], bool] = self._worker.arm
        self._any_tag = libucxx.UCXXTag(0), libucxx.UCXXTagMask(0)

    def set_close_on_exec(self) -> bool:
        """Make the descriptors close-on-exec that UCX has opened, which it does without the flag.

        Returns False if there is no descriptor left to look for them.

        They are found from `fd`: the epoll sets below it have the connections; the set of UCX's own
        thread, which has one of those below it, has the ports. A connection may be accepted at any
        time, and is inherited by a program that is started before the next call.
        """
        try:
            links = _links()
        except OSError:
            return False
        sets = {fd: _watched(fd) for fd, link in links.items() if link == "anon_inode:[eventpoll]"}
        found = _below({self.fd}, sets)
        shared = found - {self.fd}  # `fd` itself is in the set of the transport's thread
        found = _below(found | {fd for fd, watched in sets.items() if watched & shared}, sets)
        pipes = {links[fd] for fd in found & links.keys() if links[fd].startswith("pipe:")}
        for fd in found | {fd for fd, link in links.items() if link in pipes}:
            with contextlib.suppress(OSError):  # closed meanwhile
                os.set_inheritable(fd, False)
        return True

    def connect(self, address: bytes) -> Any:
        """Return an endpoint at once; PeerLostError only if UCX knows already that it fails."""
        try:
            return self._worker.create_endpoint_from_worker_address(
                self._ucxx.UCXAddress.create_from_buffer(address), True
            )
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot connect: {error}") from error

    def disconnect(self, endpoint: Any) -> None:
        """Close an endpoint at once, without notifying the peer; its requests fail."""
        # Not `close`: that one waits for the peer, and a frozen peer never answers.
        endpoint.close_blocking()

    def probe(self) -> UcxMessage | None:
        """Take the next message that has arrived from UCX's queue, or return None."""
        probe = self._worker.tag_probe(*self._any_tag, True)
        return UcxMessage(probe.sender_tag.value, probe.length, probe) if probe.matched else None

    def send(self, endpoint: Any, array: Any, tag: int) -> Any:
        """Start a send; return its ucxx request. Raises PeerLostError if the endpoint failed."""
        try:
            return endpoint.tag_send(array, self._ucxx.UCXXTag(tag))
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot send: {error}") from error

    def receive(self, endpoint: Any, array: Any, message: UcxMessage) -> Any:
        """Start receiving a message; otherwise as `send`."""
        try:
            return endpoint.tag_recv_with_handle(array, message.handle)
        except self._ucxx.UCXError as error:
            raise PeerLostError(f"UCX cannot receive: {error}") from error

    def discard(self, message: UcxMessage) -> Any:
        """Start receiving a message into no memory; UCX drops it and completes its sender."""
        return self._worker.tag_recv_with_handle(self._array(bytearray()), message.handle)

    def error(self, request: Any) -> str | None:
        """Return why a completed request failed, or None."""
        try:
            request.check_error()
        except self._ucxx.UCXError as error:
            return str(error)
        return None

    def array(self, memory: object) -> Any:
        """Return a region, or a contiguous buffer, in the form that UCX takes; copies nothing."""
        if isinstance(memory, Region) and memory.device != "cpu":
            memory = _CudaMemory(memory)
        elif isinstance(memory, Region):
            # A view of no bytes cannot be cast.
            memory = memory.view() if memory.nbytes else bytearray()
        array = self._array(memory)
        if not array.c_contiguous:
            raise ValueError("memory with gaps cannot be one message")
        return array

    def facts(self) -> dict[str, Any]:
        """Return UCX's version, whether it has CUDA, and the devices that it chose."""
        lines = self._context.info.splitlines()
        return {
            "ucx": ".".join(map(str, self._ucxx.get_ucx_version())),
            "cuda": bool(self._context.cuda_support),
            "devices": [line.split()[-1] for line in lines if "resource" in line],
        }


def _links() -> dict[int, str]:
    """Return what each descriptor of this process refers to."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return links


def _watched(fd: int) -> set[int]:
    """Return the descriptors in an epoll set."""
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _below(roots: set[int], sets: dict[int, set[int]]) -> set[int]:
    """Return the roots, and all that the epoll sets among them watch, directly or not."""
    found, left = set[int](), set(roots)
    while left:
        fd = left.pop()
        found.add(fd)
        left |= sets.get(fd, set()) - found
    return found
