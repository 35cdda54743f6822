"""The code of docs/ucx.md."""

from __future__ import annotations

import importlib.util

import pytest

from omni_kvlink.connectors import ucx
from support.doc_blocks import blocks, execute

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)


def test_the_code_of_the_page_runs() -> None:
    execute(blocks("docs/ucx.md"), {})
