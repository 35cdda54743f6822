"""Without transformers: importing costs nothing, and using it says how it is installed."""

from __future__ import annotations

from absent import check_untouched, cure

USE = """
from omni_kvlink.adapters import make_cache
make_cache()
"""


def test_importing_the_adapters_touches_no_transformers() -> None:
    modules = "omni_kvlink, omni_kvlink.adapters, omni_kvlink.lookup"
    check_untouched(modules, "transformers", "tokenizers")


def test_the_cure_is_named() -> None:
    assert "pip install 'omni-kvlink[hf]'" in cure("transformers", USE)
