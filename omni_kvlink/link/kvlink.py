"""`KVLink.serve` and `KVLink.connect`: open one end of a link from a URL and options."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC
from typing import TYPE_CHECKING, Annotated, Any, TypedDict
from urllib.parse import parse_qsl

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.protocol.kept_table import backed_by
from omni_kvlink.connectors.protocol.path import path_refusal
from omni_kvlink.connectors.registry import backend, is_known, schemes, split_url
from omni_kvlink.connectors.runtime.consumer import cancel_connect
from omni_kvlink.copier import COPIER, Copier, named_copier
from omni_kvlink.errors import ConnectorError, KVLinkError, SchemaError
from omni_kvlink.link.consumer import KVConsumer
from omni_kvlink.link.producer import KVProducer
from omni_kvlink.payload.bundle import PAYLOAD_TYPES
from omni_kvlink.settings import Flag, Text, shown, there_are
from omni_kvlink.system.failures import translate_errors
from omni_kvlink.system.threads import uninterrupted
from omni_kvlink.system.waits import check_timeout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from typing_extensions import Unpack

    from omni_kvlink.connectors.base import Connector, Producer
    from omni_kvlink.connectors.protocol.kept_table import Backing
    from omni_kvlink.payload.bundle import Payload


class LinkOptions(TypedDict, total=False):
    """The options of both ends as keywords; `omni_kvlink.lowlevel.Options` describes each."""

    quota: int | str
    mode: str
    prefault: int | str | Payload | None
    inline: int | str
    directory: str | os.PathLike[str]
    allow_uids: Collection[int]
    keys: str | os.PathLike[str]
    peers: str | os.PathLike[str]
    insecure: bool
    trusted_network: bool
    ucx_tls: str
    lanes: int
    ucx_devices: str
    tcp: str
    device: str
    require: str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class ConnectOptions(Options):
    """The options of `KVLink.connect` as a configuration has them: the copier by its name."""

    copier: Annotated[str, COPIER] = "auto"


@dataclasses.dataclass(frozen=True)
class ServeOptions(ConnectOptions):
    """The options of `KVLink.serve` as a configuration has them."""

    digests: bool = True


class LinkUrl(Text):
    """The URL of a link with its options, of a known connector; or the empty text, for none."""

    def __init__(self) -> None:
        super().__init__("shm://name")

    def _read(self, value: Any, name: str) -> str:
        text = super()._read(value, name)
        try:
            scheme = read_url(text, {})[0] if text else "shm"
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from None
        if not is_known(scheme):
            existing = schemes()
            raise SchemaError(
                f"{name}={shown(text)}: no connector {scheme}{there_are(scheme, existing)}"
            )
        return text


class KVLink(ABC):  # noqa: B024 - it only registers virtual subclasses
    """Opens links: `KVLink.serve` returns a `KVProducer`, `KVLink.connect` a `KVConsumer`.

    Never instantiated: both are virtual subclasses (`abc`), which inherit neither method, so that
    `isinstance(end, KVLink)` is true.
    """

    @staticmethod
    def serve(
        url: str,
        *,
        copier: str | Copier = "auto",
        digests: bool = True,
        **options: Unpack[LinkOptions],
    ) -> KVProducer:
        """Open the producer's end.

        Args:
            url: such as `shm://bagel`; options may follow, as in `shm://bagel?mode=sealed`.
            copier: a copier, or the name of one. "auto" takes "pinned" where there is a CUDA
                device, "native" if it was built, else "torch" with one warning; a named one that is
                missing is an error.
            digests: compute a CRC-32C of each tensor while it is copied.

        Raises:
            BusyError: the name is served already.
            ConnectorError: no reader can ever have a path as in `require`.
            UnavailableError: the connector or the copier cannot run here.
            SchemaError: the URL, an option or the copier's name is not valid.
        """
        return open_producer(url, options, copier=copier, digests=digests)

    @staticmethod
    def connect(
        url: str, *, timeout: float, copier: str | Copier = "auto", **options: Unpack[LinkOptions]
    ) -> KVConsumer:
        """Open a consumer's end, before or after the producer starts; blocks until both are there.

        `url` is the producer's; `copier` and `options` are as for `serve`. `timeout` is in seconds,
        to wait for the producer. The first link of a process over a scheme imports its connector
        before: that takes about a second over `ucx://`, and the wait begins after it.

        When the main thread has ended, what waits here in other threads raises ClosedError, so that
        the process can end.

        Raises:
            TransferTimeout: no producer within `timeout` seconds.
            UnavailableError: the connector or the copier cannot run here.
            VersionError: the producer speaks another major version.
            ConnectorError: the producer refused this process, or the path is not as in `require`.
            SchemaError: the URL, an option, the timeout or the copier's name is not valid.
        """
        limit = check_timeout(timeout)
        opening = _Opening(url, copier, dict(options))

        def open_end() -> KVConsumer:
            with translate_errors(url):
                end = opening.connector.connect(opening.address, opening.options, limit)
            opening.check_path(end)
            return KVConsumer(url, end, opening.copier, host_reason=opening.host_reason(end))

        return uninterrupted(open_end, undo=KVConsumer.close, cancel=cancel_connect)


def open_producer(
    url: str,
    options: LinkOptions,
    *,
    copier: str | Copier = "auto",
    digests: bool = True,
    backing: Backing | None = None,
) -> KVProducer:
    """Do what `KVLink.serve` does; gets of what is not in memory ask `backing`, which may put it.

    KVLinkError if there is a backing, and the connector keeps no payloads.
    """
    Flag().read(digests, "digests")
    opening = _Opening(url, copier, {**options})

    def open_end() -> KVProducer:
        with translate_errors(url), backed_by(backing):
            end = opening.connector.serve(opening.address, opening.options)
        opening.check_path(end)
        if backing is not None:
            opening.check_keeps(end)
        bound, reason = url.replace(*end.bound_url, 1), opening.host_reason(end)
        return KVProducer(bound, end, opening.copier, digests=digests, host_reason=reason)

    return uninterrupted(open_end, undo=KVProducer.close)


KVLink.register(KVProducer)
KVLink.register(KVConsumer)


class _Opening:
    """A URL and its options, read: the connector and the copier of an end that is to be opened."""

    def __init__(self, url: str, copier: str | Copier, options: dict[str, Any]):
        if os.environ.get("KVLINK_TRACE"):
            from omni_kvlink.telemetry.timeline import record_if_asked

            record_if_asked()
        self._scheme, self.address, self.options = read_url(url, options)
        self.copier = named_copier(copier)
        self._refusal = "" if self.options.device else "no device= was given"
        if self.options.device and not self.copier.uses_device_memory:
            name = self.copier.name
            self._refusal = f"copier {name!r} copies to the host's memory only; use copier='pinned'"
            self.options = dataclasses.replace(self.options, device="")
        with translate_errors(url):
            self.connector = backend(self._scheme)

    def check_path(self, end: Connector) -> None:
        """Close an end and raise ConnectorError if it does not keep to `require`."""
        refusal = "" if end.tells_path else path_refusal(None, self.options.require)
        if refusal:
            end.close()
            raise ConnectorError(f"{self._scheme}://{self.address}: {refusal}")

    def check_keeps(self, end: Producer) -> None:
        """Close an end that keeps no payloads, and raise its KVLinkError."""
        try:
            _ = end.kept
        except KVLinkError:
            end.close()
            raise

    def host_reason(self, end: Connector) -> str:
        """Return why the payloads of this end lie in the host's memory; "" if they do not."""
        if self._refusal or end.device:
            return self._refusal
        return end.host_reason or f"{self._scheme}:// has them in the host's memory; use ucx://"


def read_url(url: str, options: dict[str, Any]) -> tuple[str, str, Options]:
    """Split a URL into scheme, address and options; keyword options take precedence.

    SchemaError if the URL, or an option, is not valid.
    """
    scheme, location = split_url(url)
    address, _, query = location.partition("?")
    values = Options.parse(parse_qsl(query, keep_blank_values=True)) | options
    if isinstance(values.get("prefault"), tuple(PAYLOAD_TYPES)):
        values["prefault"] = values["prefault"].plan(digests=True).nbytes
    return scheme, address, Options.read(values)
