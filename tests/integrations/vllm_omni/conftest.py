"""What the processes of stages import is imported once."""

from __future__ import annotations

import os

from support.processes import fork_server

os.environ["HF_HUB_OFFLINE"] = "1"  # which is read at import
fork_server.preload("vllm_omni.distributed.omni_connectors.kv_transfer_manager")
