"""`ActorLinks`: the producer and the consumers of a process, each opened when first used."""

from __future__ import annotations

import contextlib
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink import KVLink
from omni_kvlink.errors import ConnectorError, FileError, PeerLostError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.integrations.ray.settings import RaySettings

PUBLIC = ".public"


class TensorOrigin(NamedTuple):
    """The URL of the link that has the tensors of a process, and its public key, if any."""

    url: str
    public_key: str


class _Peer:
    """A consumer, and the number of transfers that use it now."""

    def __init__(self, link: KVConsumer):
        self.link, self.users = link, 0


class ActorLinks:
    """One producer for all objects of this process, one consumer for each source; thread-safe."""

    def __init__(self, settings: RaySettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._served: tuple[KVProducer, TensorOrigin] | None = None
        self._peers: dict[str, _Peer] = {}

    def producer(self, node: str) -> tuple[KVProducer, TensorOrigin]:
        """The producer, opened at the first call, and how readers find it; `node` is an address.

        Raises what `KVLink.serve` raises.
        """
        with self._lock:
            if self._served is None:
                options = dict(self._settings.options)
                link = KVLink.serve(self._url(self._settings.host or node), **options)
                self._served = link, TensorOrigin(link.url, _public_key(options.get("keys", "")))
            return self._served

    @contextlib.contextmanager
    def consumer(self, source: TensorOrigin) -> Iterator[KVConsumer]:
        """Lend the consumer of a source, which is opened when it is first used, or was lost.

        Raises:
            PeerLostError: the source is gone.
            ConnectorError: its public key is not one of `peers`.
        """
        peer = self._borrow(source)
        try:
            yield peer.link
        finally:
            with self._lock:
                peer.users -= 1
                is_unused = not peer.users and self._peers.get(source.url) is not peer
            if is_unused:
                peer.link.close()

    def stats(self) -> dict[str, Any]:
        """The `stats` of the producer, if it is open, and those of the consumers."""
        with self._lock:
            served, peers = self._served, list(self._peers.values())
        links = [] if served is None else [served[0]]
        return {
            "producers": [link.stats() for link in links],
            "consumers": [peer.link.stats() for peer in peers],
        }

    def close(self) -> None:
        """Close all links; received tensors stay valid. Ray itself ends its processes instead."""
        with self._lock:
            links = [peer.link for peer in self._peers.values()]
            served, self._served = self._served, None
            self._peers.clear()
        for link in [*links, *(served or ())[:1]]:
            link.close()

    def _url(self, host: str) -> str:
        """The URL to serve at; a port is the system's choice."""
        name, transport = f"ray-{uuid.uuid4().hex}", self._settings.transport
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        return {"shm": f"shm://{name}", "auto": f"auto://{name}?tcp={address}"}.get(
            transport, f"{transport}://{address}"
        )

    def _borrow(self, source: TensorOrigin) -> _Peer:
        with self._lock:
            lost = self._forget_lost()
            peer = self._peers.get(source.url)
            if peer is not None:
                peer.users += 1
        for each in lost:
            each.link.close()
        if peer is None:
            link = self._connect(source)  # without the lock: it may wait for its source alone
            with self._lock:
                peer = self._peers.setdefault(source.url, _Peer(link))
                peer.users += 1
            if peer.link is not link:
                link.close()
        return peer

    def _connect(self, source: TensorOrigin) -> KVConsumer:
        """Connect to a source, which was there when its object was made."""
        options = {**self._settings.options}
        options.pop("digests", None)
        if source.public_key:
            options["peers"] = _file_of(source.public_key, options.get("peers", ""))
        try:
            limit = self._settings.connect_timeout
            return KVLink.connect(source.url, timeout=limit, **options)
        except TransferTimeout as error:
            if error.phase == "connecting":  # a busy process is connected to, and does not answer
                raise PeerLostError(str(error)) from None
        return KVLink.connect(source.url, timeout=self._settings.timeout, **options)

    def _forget_lost(self) -> list[_Peer]:
        """Forget the peers whose processes are gone: actors come and go. Return the unused ones."""
        lost = {url: peer for url, peer in self._peers.items() if not peer.link.is_connected}
        for url in lost:
            del self._peers[url]
        return [peer for peer in lost.values() if not peer.users]


def _public_key(keys: str) -> str:
    """The text of the public key that `kvlink keygen` wrote beside a secret one; "" for none."""
    if not keys:
        return ""
    path = Path(keys).with_suffix(PUBLIC)
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        text = f"{path}, which readers need, cannot be read ({error}): `kvlink keygen` writes it"
        raise FileError(text, errno=error.errno) from None


def _file_of(public_key: str, directory: str) -> str:
    """The file of `directory` that has this public key; ConnectorError if none has it."""
    for path in sorted(Path(directory).glob(f"*{PUBLIC}")) if directory else ():
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii").strip() == public_key:
                return str(path)
    raise ConnectorError(
        f"the source's public key {public_key!r} is in no file of peers={directory!r}: put the "
        "public keys of all nodes there, on each of them"
    )
