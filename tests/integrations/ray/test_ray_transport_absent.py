"""Without Ray: the integration can be imported, and `register` names the package to install."""

from __future__ import annotations

from support.processes.absent import check_untouched, cure

USE = """
import omni_kvlink.integrations.ray
omni_kvlink.integrations.ray.register()
"""


def test_importing_it_touches_no_ray() -> None:
    check_untouched("omni_kvlink.integrations.ray", "ray")


def test_the_cure_is_named() -> None:
    assert "pip install 'omni-kvlink[ray]'" in cure("ray", USE)
