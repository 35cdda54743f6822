"""`LoRARequest`: names an adapter, as vLLM does."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Annotated

from omni_kvlink.errors import SchemaError
from omni_kvlink.settings import FilePath, Integer, Settings, Text

LORA_PARAMS = frozenset(("lora_request", "lora_int_id", "lora_scale"))
"""The sampling params that choose an adapter."""


@dataclasses.dataclass(frozen=True)
class LoRARequest(Settings):
    """An adapter in PEFT's format; SchemaError if a field says nothing.

    Attributes:
        lora_name: for errors and logs.
        lora_int_id: 1 or more; the same adapter has the same number in all requests and stages.
        lora_path: its directory, on the machine of every worker.
    """

    lora_name: Annotated[str, Text(filled=True)]
    lora_int_id: Annotated[int, Integer(1)]
    lora_path: Annotated[str, FilePath(filled=True)]


def checked_id(request: LoRARequest | None, number: int | None, scale: float) -> int | None:
    """The number of the adapter that sampling params name; SchemaError if they contradict."""
    if request is not None and not isinstance(request, LoRARequest):
        raise SchemaError(f"lora_request {request!r:.80}: a LoRARequest")
    if request is not None and number not in (None, request.lora_int_id):
        lora_int_id = request.lora_int_id
        raise SchemaError(f"lora_int_id {number}: the lora_request has {lora_int_id}")
    if not math.isfinite(scale):
        raise SchemaError(f"lora_scale {scale}: a finite number")
    return number if request is None else request.lora_int_id


def stable_lora_int_id(lora_path: str) -> int:
    """The number of an adapter that has a path alone, the same in every process."""
    digest = hashlib.sha256(lora_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << 63) or 1
