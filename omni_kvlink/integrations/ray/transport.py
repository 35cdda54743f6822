"""`KVLinkTransport`: what Ray calls in each process to pass tensors by reference."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from omni_kvlink import TensorTransferData
from omni_kvlink.errors import (
    DuplicateKeyError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    without_frames,
)
from omni_kvlink.integrations.ray.actor_links import ActorLinks, TensorOrigin
from omni_kvlink.integrations.ray.object_quota import ObjectQuota
from omni_kvlink.integrations.ray.settings import RaySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("omni_kvlink")

_REMEMBERED = 1024
"""Aborted transfers, and actors that were warned about, that a process remembers."""


@dataclasses.dataclass
class KVLinkMetadata(TensorTransportMetadata):  # type: ignore[misc, unused-ignore]
    """The place of the tensors of an object; `source` is None if it has none.

    `node` is the address of the source's node.
    """

    source: TensorOrigin | None = None
    node: str = ""


class KVLinkTransport(TensorTransportManager):  # type: ignore[misc, unused-ignore]
    """Keeps an object's tensors in the link of the process that made it, for any number of readers.

    Ray makes one in each process, of the subclass that `register` made, and calls it in several
    threads.
    """

    name: ClassVar[str] = "KVLINK"
    settings: ClassVar[RaySettings] = RaySettings()

    def __init__(self) -> None:
        self.links = ActorLinks(self.settings)
        self._kept = ObjectQuota(self.settings.quota)
        self._aborted = collections.deque[str](maxlen=_REMEMBERED)
        self._warned = collections.deque[str](maxlen=_REMEMBERED)

    def tensor_transport_backend(self) -> str:
        """The name that methods give as their `tensor_transport`, in capitals."""
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        """True: a reader gets the tensors without a task of the actor that made them."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """True; else Ray would kill the source of an object when one of its readers dies."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """True: Ray registers the transport with an actor before it calls a method."""
        return True

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Nothing: the tensors' metadata say where they are. Called by the owner of the object.

        Logs what an actor lacks that is to receive one. An error would end the owner's process if
        it was raised in the thread in which Ray calls this once the object is made.
        """
        if dst_actor is not None and not getattr(dst_actor, "_ray_enable_tensor_transport", True):
            self._warn(dst_actor)
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> KVLinkMetadata:
        """Copy the tensors into the link, where they are kept until `garbage_collect`.

        Blocks while the objects that have references leave no memory, for `put_timeout` seconds.

        Raises:
            SchemaError: a tensor is not in the host's memory, or has a dtype that is not sent.
            CapacityError: there was no memory within that time.
        """
        about = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        if not rdt_object:
            return KVLinkMetadata(about)
        node = ray.util.get_node_ip_address()
        data = TensorTransferData(obj_id, _on_host(rdt_object))
        producer, source = self.links.producer(node)
        timeout = self.settings.put_timeout
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in rdt_object)
        self._kept.take(obj_id, nbytes, timeout=timeout)
        try:
            # Ray repeats a task whose answer was lost, and keeps the tensors of the first time.
            with contextlib.suppress(DuplicateKeyError):
                producer.put(data, readers=None, timeout=timeout)
        except BaseException:
            self._kept.free(obj_id)
            raise
        return KVLinkMetadata(about, "cpu", source, node)

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: KVLinkMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Get the tensors: copies, each byte checked; with `views`, readonly views.

        Blocks for up to `timeout` seconds. They are copied into `target_buffers`, if there are any.

        Raises:
            PeerLostError: the process that made the object is gone.
            TransferFailed: it has the object no more, or Ray has aborted the transfer.
            IntegrityError: the bytes are not those that were put.
        """
        try:
            return self._receive(obj_id, tensor_transport_metadata, target_buffers)
        except KVLinkError as error:
            raise without_frames(error)  # noqa: B904  # Ray keeps it, and its frames the tensors

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: KVLinkMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Never called by Ray: the transport is one-sided."""
        raise NotImplementedError("the readers of a one-sided transport get what they need")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: KVLinkMetadata, tensors: list[torch.Tensor]
    ) -> None:
        """Withdraw the object, which has no references; its memory is free after the last view."""
        if tensor_transport_meta.source is None:
            return
        producer, _ = self.links.producer(tensor_transport_meta.node)
        producer.withdraw(obj_id)
        self._kept.free(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Have the transfer of an object raise TransferFailed, at the latest after `timeout`."""
        self._aborted.append(obj_id)

    def _receive(
        self, obj_id: str, about: KVLinkMetadata, targets: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        if about.source is None:
            return []
        self._check_wanted(obj_id)
        timeout = self.settings.timeout
        try:
            with self.links.consumer(about.source) as link:
                if self.settings.views and targets is None:
                    received = link.get(obj_id, timeout=timeout, wait=False)
                    tensors: list[Any] = received.data.tensors()
                else:
                    tensors = list(targets or map(_empty, about.tensor_meta))
                    link.get(obj_id, timeout=timeout, into=tensors, wait=False).release()
        except PeerLostError as error:
            raise self._lost(obj_id, about, error) from None
        self._check_wanted(obj_id)
        return tensors

    def _check_wanted(self, obj_id: str) -> None:
        if obj_id in self._aborted:
            text = f"Ray has aborted the transfer of object {obj_id}"
            raise TransferFailed(text, key=obj_id, reason="aborted by Ray")

    def _lost(self, obj_id: str, about: KVLinkMetadata, error: Exception) -> PeerLostError:
        """The error of a transfer whose source cannot be reached."""
        own_node = ray.util.get_node_ip_address()
        if self.settings.transport == "shm" and about.node != own_node:
            return PeerLostError(
                f"object {obj_id} is on node {about.node}, and this is node {own_node}: shm:// "
                'does not leave a machine, register(transport="auto", keys=…, peers=…) does'
            )
        return PeerLostError(
            f"the process that made object {obj_id} is gone, and the tensors with it: {error}"
        )

    def _warn(self, actor: Any) -> None:
        if actor._actor_id.hex() not in self._warned:
            self._warned.append(actor._actor_id.hex())
            log.warning(
                "%r is to receive tensors, and was created without enable_tensor_transport=True: "
                "it may wait for them until Ray's timeout; create it by "
                "@ray.remote(enable_tensor_transport=True)",
                actor,
            )


def _on_host(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their numbers; SchemaError if one is not in the host's memory."""
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise SchemaError(
                f"tensor {number} is on {tensor.device}, and this transport is for tensors in the "
                "host's memory: return tensor.cpu(), or give another tensor_transport"
            )
    return {str(number): tensor.detach() for number, tensor in enumerate(tensors)}


def _empty(about: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
    shape, dtype = about
    return torch.empty(shape, dtype=dtype)
