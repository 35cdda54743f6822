"""Send nested dicts and lists of tensors, with JSON metadata.

python examples/nested_tensors.py
"""

from __future__ import annotations

import torch

from omni_kvlink import KVLink, TensorTransferData


def main() -> None:
    data = TensorTransferData(
        "req-1",
        {"hidden": [torch.randn(16, 64), torch.randn(8, 64)], "mask": {"text": torch.ones(16) > 0}},
        {"prompt": "a red fox", "scales": [4.0, 1.5]},
    )
    with KVLink.serve("inproc://nested") as producer:
        receipt = producer.put(data)
        with KVLink.connect("inproc://nested", timeout=5.0) as consumer:
            with consumer.get("req-1", timeout=5.0) as received:
                assert isinstance(received, TensorTransferData)
                print(received["hidden"][1].shape, received["mask"]["text"], received.metadata)
            receipt.wait(timeout=5.0)


if __name__ == "__main__":
    main()
