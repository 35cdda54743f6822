"""`check_connector`: what a connector must do, each behaviour a small named function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from omni_kvlink.testing import (
    allocation_checks,
    delivery_checks,
    direct_checks,
    ending_checks,
    memory_checks,
    scatter_checks,
    stream_checks,
    stream_ending_checks,
)
from omni_kvlink.testing.failure import CheckFailed
from omni_kvlink.testing.rig import Handle, ProcessPeer, Rig, ThreadPeer

Check = Callable[[Rig], None]


def _checks_of(*modules: ModuleType) -> tuple[Check, ...]:
    return tuple(
        function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("check_") and inspect.getmodule(function) is module
    )


CONNECTOR_CHECKS = _checks_of(
    delivery_checks,
    ending_checks,
    memory_checks,
    stream_checks,
    stream_ending_checks,
    scatter_checks,
    allocation_checks,
    direct_checks,
)
"""Every behaviour that `check_connector` asks for, in the order it asks."""


def check_connector(
    make_url: Callable[[], str],
    *,
    options: Mapping[str, Any] | None = None,
    processes: bool = True,
    checks: Iterable[Check] = CONNECTOR_CHECKS,
) -> None:
    """Run every check against one connector.

    Args:
        make_url: gives a URL that was not used before, at each call.
        options: for `KVLink.serve` and `KVLink.connect`.
        processes: readers live in a process of their own; False for connectors within one.

    Raises:
        CheckFailed: names the first behaviour that is missing.
    """
    handle: Handle = ProcessPeer() if processes else ThreadPeer()
    try:
        for check in checks:
            run_check(check, Rig(make_url, options or {}, handle))
    finally:
        handle.end()


def run_check(check: Check, rig: Rig) -> None:
    """One check on a fresh rig, which is closed afterwards."""
    name = getattr(check, "__name__", repr(check))
    try:
        check(rig)
    except Exception as error:
        raise CheckFailed(name, str(error) or repr(error)) from error
    finally:
        rig.close()
