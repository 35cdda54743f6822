"""`KVLink`: a KV cache in at one end, out at the other."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from types import TracebackType
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl

from . import _faults
from .bundle import KVCacheBundle
from .connectors.base import Consumer, Delivery, Options, Producer, Receipt, Want, wrong_side
from .connectors.registry import backend, split_url
from .copier import Copier, NativeCopier, TorchCopier, fastest_copier
from .errors import ClosedError, SchemaError, WireError
from .files import open_payload
from .ledger import Ledger
from .memory import Region
from .schema import KVCacheTransferData
from .wire import Manifest

Payload: TypeAlias = KVCacheTransferData | KVCacheBundle
FOREVER = 1e9
"""Seconds that every clock of the system still takes; a longer timeout means this one."""
Verify: TypeAlias = Literal["auto", "full", "off"]


class KVLink:
    """One end of a link between two stages; thread-safe; a context manager.

    Make one with `KVLink.serve` (the stage that puts) or `KVLink.connect` (the stages that get).
    """

    def __init__(self, url: str, end: Producer | Consumer, *, copier: Copier, digests: bool):
        self.url = url
        self._end = end
        self._copier, self._digests = copier, digests
        self._closed = False

    @classmethod
    def serve(
        cls, url: str, *, copier: str = "auto", digests: bool = True, **options: Any
    ) -> KVLink:
        """Open the producer's end.

        Args:
            url: such as `shm://bagel`; options may follow, as in `shm://bagel?mode=sealed`.
            copier: "auto" takes "native" if it was built, else "torch" with one warning; a named
                one that is missing is an error.
            digests: compute a CRC-32C of each tensor while it is copied.
            options: fields of `Options`: quota, mode, prefault, directory.

        Raises:
            BusyError: the name is served already.
            UnavailableError: the connector cannot run here.
        """
        scheme, address, chosen = _parse(url, options)
        mover = _copier(copier)
        return cls(url, backend(scheme).serve(address, chosen), copier=mover, digests=digests)

    @classmethod
    def connect(cls, url: str, *, timeout: float, copier: str = "auto", **options: Any) -> KVLink:
        """Open a consumer's end, before or after the producer starts.

        Raises:
            TransferTimeout: no producer within `timeout` seconds.
            UnavailableError, VersionError, ConnectorError
        """
        scheme, address, chosen = _parse(url, options)
        mover = _copier(copier)
        end = backend(scheme).connect(address, chosen, min(timeout, FOREVER))
        return cls(url, end, copier=mover, digests=True)

    def put(
        self, data: Payload, *, readers: int = 1, ttl: float = 60.0, timeout: float = 10.0
    ) -> Receipt:
        """Copy a cache into the link's memory and publish it under its request id.

        Returns when it is committed: the caller's tensors are free again. Whether it arrived is
        the receipt's to say.

        Args:
            readers: how many `get`s shall have it.
            ttl: seconds in which they must come.
            timeout: seconds to wait for room.

        Raises:
            DuplicateKeyError: a live payload has this request id.
            CapacityError: no room within the timeout; asked and free bytes are its attributes.
            SchemaError, ClosedError
        """
        producer = self._producer("put")
        ledger = Ledger(
            copier=self._copier.name,
            instructions=self._copier.features,
            digests="crc32c" if self._digests else "off",
        )
        with ledger.phase("plan"):
            plan = data.plan(digests=self._digests)
            if isinstance(data, KVCacheBundle):
                ledger.reused_nbytes = data.reused_nbytes
        with ledger.phase("reserve"):
            lease = producer.reserve(plan.request_id, plan.nbytes, timeout=min(timeout, FOREVER))
        with lease:
            _faults.point("put.reserved")
            with ledger.phase("copy"):
                digests = self._copier.gather(data.tensors(), plan, lease.region)
            _faults.point("put.copied")
            with ledger.phase("publish"):
                header = plan.with_digests(digests).encode()
                lease.region.view()[: len(header)] = header
                _faults.point("put.encoded")
                ledger.nbytes, ledger.copies = plan.nbytes, 1 if plan.tensors else 0
                return producer.publish(lease, readers=readers, ttl=ttl, ledger=ledger)

    def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
        """Wait for a cache; woken when it is committed.

        Used as `with link.get(...) as data:`. The tensors are readonly views of the link's
        memory (writing to one ends the process); they are valid inside the block, and beyond it
        for as long as one of them is kept. The memory goes back when the last view is gone.

        Args:
            verify: "full" checks every byte against its digest first. "auto" checks the header
                and the commit word, which rule out torn and stale payloads, and leaves the bytes
                to whoever copies them. "off" is "auto".

        Raises:
            TransferTimeout: names how far the payload had come.
            TransferFailed: the producer said that it failed, or it expired.
            PeerLostError: the producer died, or closed the link.
            IntegrityError, VersionError, WireError: the payload is not what was committed.
        """
        consumer = self._consumer("get")
        check_verify(verify)
        started = time.perf_counter()
        delivery = consumer.receive(_check_id(request_id), timeout=min(timeout, FOREVER))
        return self.open_delivery(delivery, started=started, verify=verify)

    def begin_get(self, request_id: str, *, timeout: float) -> Want:
        """Ask for a cache without waiting; for event loops, see `omni_kvlink.aio`."""
        return self._consumer("get").begin(_check_id(request_id), timeout=min(timeout, FOREVER))

    def open_delivery(self, delivery: Delivery, *, started: float, verify: Verify) -> Received:
        """Check a delivery and make views of it; a bad one is rejected at its producer."""
        ledger = Ledger()
        ledger.seconds["wait"] = time.perf_counter() - started
        try:
            check_verify(verify)
            with ledger.phase("view"):
                assert delivery.region is not None
                manifest = _manifest(delivery.key, delivery.region)
                data = open_payload(manifest, delivery.region)
            if verify == "full" and manifest.has_digests:
                with ledger.phase("verify"):
                    self._copier.verify(manifest, delivery.region)
        except BaseException as error:  # dropped in silence, it would count as read
            delivery.reject(str(error) or repr(error))
            raise
        ledger.nbytes = manifest.nbytes
        ledger.digests = "crc32c" if manifest.has_digests else "off"
        return Received(data, delivery, manifest, ledger)

    def fail(self, request_id: str, reason: str) -> None:
        """Tell whoever waits for `request_id`, or asks later, that it will not come."""
        self._producer("fail").fail(_check_id(request_id), reason)

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """End a transfer from either side: nobody waits for it any more."""
        self._check_open()
        _check_id(request_id)
        if isinstance(self._end, Producer):
            self._end.fail(request_id, reason, aborted=True)
        else:
            self._end.abort(request_id, reason)

    def stats(self) -> dict[str, Any]:
        """State and counters of this end, as JSON values."""
        return {"url": self.url, **self._end.health()}

    def close(self) -> None:
        """Refuse new work, wake who waits, free the memory; a second call does nothing.

        Payloads not yet fetched are lost, and their receipts say so: wait for them first.
        """
        self._closed = True
        self._end.close()

    def __enter__(self) -> KVLink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid_owns():
            warnings.warn(f"link {self.url} was not closed", ResourceWarning, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        side = "producer" if isinstance(self._end, Producer) else "consumer"
        return f"<KVLink {self.url}, {side}{', closed' if self._closed else ''}>"

    def _pid_owns(self) -> bool:
        return os.getpid() == getattr(self._end, "_pid", os.getpid())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"link {self.url} is closed")

    def _producer(self, verb: str) -> Producer:
        self._check_open()
        if not isinstance(self._end, Producer):
            raise wrong_side(verb, f"it was connected; KVLink.serve({self.url!r}) can")
        return self._end

    def _consumer(self, verb: str) -> Consumer:
        self._check_open()
        if not isinstance(self._end, Consumer):
            raise wrong_side(verb, f"it serves; KVLink.connect({self.url!r}, timeout=…) can")
        return self._end


class Received:
    """A cache that arrived: `with` gives its data, and gives it back at the end.

    Attributes:
        manifest: sizes, positions and digests.
        ledger: what the receipt of it cost on this side.
    """

    def __init__(self, data: Payload, delivery: Delivery, manifest: Manifest, ledger: Ledger):
        self.data = data
        self.manifest, self.ledger = manifest, ledger
        self._delivery = delivery

    def release(self) -> None:
        """Let go of the payload; tensors that are kept elsewhere keep its memory."""
        self.data.close()
        self._delivery.drop()

    def __enter__(self) -> Payload:
        return self.data

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()


def check_verify(verify: str) -> None:
    if verify not in ("auto", "full", "off"):
        raise ValueError(f"verify {verify!r}; wanted 'auto', 'full' or 'off'")


def _check_id(request_id: str) -> str:
    """Refused here, because a peer would take it for garbage and end the connection."""
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= 1024:
        raise SchemaError("request_id: a string of 1 to 1024 characters")
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"request_id: no text: {error}") from None
    return request_id


def _manifest(key: str, region: Region) -> Manifest:
    manifest = Manifest.decode(region.view())
    if manifest.request_id != key:
        raise WireError(f"asked for {key!r}, the payload says it is {manifest.request_id!r}")
    return manifest


def _parse(url: str, options: dict[str, Any]) -> tuple[str, str, Options]:
    scheme, rest = split_url(url)
    address, _, query = rest.partition("?")
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    values: dict[str, Any] = {
        name: int(text) if fields.get(name) == "int" else text for name, text in parse_qsl(query)
    }
    values.update(options)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"no option {', '.join(unknown)}; there are {', '.join(fields)}")
    return scheme, address, Options(**values)


def _copier(name: str) -> Copier:
    """An explicit wish that cannot be met is an error; "auto" says once if it had to do without."""
    if name == "auto":
        return fastest_copier()
    if name == "native":
        return NativeCopier()
    if name == "torch":
        return TorchCopier()
    raise ValueError(f"no copier {name!r}; there are 'auto', 'native' and 'torch'")
