"""Without transformers: importing works, and the error says how to install it."""

from __future__ import annotations

from support.processes.absent import check_untouched, cure

USE = """
from omni_kvlink.adapters import make_cache
make_cache()
"""


def test_importing_the_adapters_touches_no_transformers() -> None:
    modules = "omni_kvlink, omni_kvlink.adapters, omni_kvlink.lookup"
    check_untouched(modules, "transformers", "tokenizers")


def test_the_error_says_how_to_install_transformers() -> None:
    assert "pip install 'omni-kvlink[hf]'" in cure("transformers", USE)
