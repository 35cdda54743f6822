"""The identity of an adapter's (LoRA's) weights, which means the same in another engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.*"
"""The files of an adapter that vLLM reads."""

_CHUNK = 1 << 20


class _Adapter(NamedTuple):
    """An adapter whose files were read."""

    files: Sequence[Path]
    state: list[tuple[int, int, int]]  # of the files, when they were read
    digest: str


class AdapterIdentities:
    """The identity of each adapter: a digest of its files, or what `names` says for its name.

    An adapter's name alone may stand for different weights in two engines; its path and number
    may differ for the same ones.

    Args:
        names: the setting `adapters`: identities by adapter name, equal on both sides.
    """

    def __init__(self, names: Mapping[str, str], vllm_config: VllmConfig):
        self._names = names
        lora: Any = vllm_config.lora_config
        modules = sorted(getattr(lora, "target_modules", None) or ())
        self._options = [str(getattr(lora, "lora_dtype", "")), modules]
        self._adapters: dict[tuple[str, str, int], _Adapter] = {}

    def identify(self, adapter: LoRARequest | None) -> str:
        """The identity of an adapter in this engine; "" for None.

        Reads the files of an adapter that it does not know; blocks meanwhile.

        Raises:
            SchemaError: the files cannot be read, or are no longer those that were read.
        """
        if adapter is None:
            return ""
        name = self._names.get(adapter.lora_name)
        weights = ["sha256", self._digest(adapter)] if name is None else ["name", name]
        return json.dumps([*weights, *self._options])

    def _digest(self, adapter: LoRARequest) -> str:
        key = adapter.lora_name, adapter.lora_path, adapter.lora_int_id
        try:
            record = self._adapters.get(key) or _read(adapter)
            state = _state(record.files)
        except Exception as error:
            raise _unknown(adapter, f"cannot be read: {error}") from error
        if state != record.state:  # and vLLM may have loaded either
            raise _unknown(adapter, "have changed since they were first used")
        self._adapters[key] = record
        return record.digest


def _read(adapter: LoRARequest) -> _Adapter:
    """Read the files of an adapter, as vLLM finds them."""
    from vllm.lora.utils import get_adapter_absolute_path

    if getattr(adapter, "tensorizer_config_dict", None):
        raise ValueError("they are tensorizer's")
    folder = Path(get_adapter_absolute_path(adapter.lora_path))
    files = [folder / CONFIG, *sorted(folder.glob(WEIGHTS))]
    if len(files) == 1:
        raise FileNotFoundError(f"there is no {WEIGHTS}")
    state, digest = _state(files), hashlib.sha256()
    for file, (size, *_) in zip(files, state, strict=True):
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return _Adapter(files, state, digest.hexdigest())


def _state(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """The size of each file, and what changes with its content."""
    stats = [file.stat() for file in files]
    return [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _unknown(adapter: LoRARequest, reason: str) -> SchemaError:
    return SchemaError(
        f"the files of the adapter {adapter.lora_name!r:.100} at {adapter.lora_path!r:.200} "
        f"{reason}; load its weights under another path, or name them in the setting adapters, as "
        f'{{"{adapter.lora_name:.100}": "…"}}, equal on both sides'
    )
