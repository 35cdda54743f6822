"""A consumer process: copies a payload to its device and prints the digests."""

from __future__ import annotations

import hashlib
import sys

import torch

from omni_kvlink import KVLink
from omni_kvlink.copier import PinnedCopier
from support.devices.gpu import DEVICE
from support.link.ends import delivery_of


def main(url: str, directory: str) -> None:
    with KVLink.connect(url, timeout=30, directory=directory) as link:
        received = link.get("r", timeout=60, verify="full")
        with received as data:
            views = data.tensors()
            targets = [torch.zeros(view.shape, dtype=view.dtype, device=DEVICE) for view in views]
            region = delivery_of(received).region
            assert region is not None
            PinnedCopier().scatter(received.manifest, region, targets)
        for target in targets:
            print(hashlib.sha256(target.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
