"""vLLM-Omni's serializer, with placeholders for the bytes of tensors, arrays and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import msgpack
from vllm_omni.distributed.omni_connectors.utils.serialization import (
    OmniMsgpackDecoder,
    OmniMsgpackEncoder,
)

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm_omni.nested import ExtHook, TakenTensors


class OmniTensorSerializer:
    """Encodes and decodes as vLLM-Omni's `OmniSerializer` does; a `nested.Serializer`."""

    def encode(self, data: Any, taken: TakenTensors | None = None) -> bytes:
        """Encode data; the large tensors, arrays and images in it go into `taken`."""
        encoder = OmniMsgpackEncoder() if taken is None else _Encoder(taken)
        packed: bytes = encoder.encode(data)
        return packed

    def decode(self, data: memoryview, restore: ExtHook | None = None) -> Any:
        """Decode data; each placeholder in it becomes what `restore` returns."""
        decoder = OmniMsgpackDecoder() if restore is None else _Decoder(restore)
        return decoder.decode(data)


class _Encoder(OmniMsgpackEncoder):  # type: ignore[misc, unused-ignore]
    """Puts placeholders as "data" into the dicts that stand for tensors, arrays and images."""

    def __init__(self, taken: TakenTensors):
        super().__init__()
        self._taken = taken

    def _encode_tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        placeholder = self._taken.take(tensor)
        if placeholder is None:
            return self._without_bytes(super()._encode_tensor(tensor))
        encoded = super()._encode_tensor(torch.empty(0, dtype=tensor.dtype))
        return {**encoded, "shape": list(tensor.shape), "data": placeholder}

    def _encode_ndarray(self, arr: Any) -> dict[str, Any]:
        return self._without_bytes(super()._encode_ndarray(arr))

    def _encode_pil_image(self, img: Any) -> dict[str, Any]:
        return self._without_bytes(super()._encode_pil_image(img))

    def _without_bytes(self, encoded: dict[str, Any]) -> dict[str, Any]:
        return {**encoded, "data": self._taken.take_bytes(encoded["data"])}


class _Decoder(OmniMsgpackDecoder):  # type: ignore[misc, unused-ignore]
    """The counterpart: "data" may be the tensor itself, or a view of bytes."""

    def __init__(self, restore: ExtHook):
        super().__init__()
        self.decoder = msgpack.Decoder(ext_hook=restore)

    def _decode_tensor(self, obj: dict[str, Any]) -> torch.Tensor:
        data = obj["data"]
        return data if isinstance(data, torch.Tensor) else super()._decode_tensor(obj)
