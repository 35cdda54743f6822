"""The decoding side of the transformers tests: a process of its own.

Each line of standard input is a job; each answer says that its logits are written.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVConsumer, KVLink
from omni_kvlink.adapters import DynamicCacheAdapter
from support.e2e.hf_models import Case, decode

make = functools.lru_cache(maxsize=1)(Case.make)


def run(link: KVConsumer, job: dict[str, Any]) -> None:
    model = make(Case(**job["case"]))
    with link.get(job["key"], timeout=120.0, verify="full") as payload:
        assert isinstance(payload, KVCacheTransferData | KVCacheBundle)
        cache = DynamicCacheAdapter().unpack(payload, config=model.config)
        first = payload if isinstance(payload, KVCacheTransferData) else payload["layers_0"]
        ropes, extra = list(first.metadata.ropes), first.metadata.extra
    del payload, first
    logits = decode(
        model, cache, torch.tensor(extra["token"]), ropes, torch.tensor(extra["attention_mask"])
    )
    save_file({"logits": logits}, job["out"])


def main() -> None:
    torch.set_num_threads(1)
    url, sockets = sys.argv[1:]
    with KVLink.connect(url, timeout=120.0, directory=sockets) as link:
        for line in sys.stdin:
            run(link, json.loads(line))
            print("decoded", flush=True)


if __name__ == "__main__":
    main()
