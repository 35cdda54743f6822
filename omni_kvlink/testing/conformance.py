"""`check_connector`: hold a connector to its contract, one small named check for each behaviour."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omni_kvlink.testing import (
    batch_checks,
    delivery_checks,
    ending_checks,
    growing_checks,
    leaving_checks,
    memory_checks,
    scatter_checks,
    stream_checks,
    tensor_checks,
    zero_copy_checks,
)
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import Peer, ProcessPeer, ThreadPeer
from omni_kvlink.testing.rig import Rig, run_checked

Check = Callable[[Rig], None]


_MODULES = (
    delivery_checks,
    ending_checks,
    memory_checks,
    stream_checks,
    growing_checks,
    leaving_checks,
    batch_checks,
    scatter_checks,
    zero_copy_checks,
    tensor_checks,
)
CONNECTOR_CHECKS: tuple[Check, ...] = tuple(
    function
    for module in _MODULES
    for name, function in vars(module).items()
    if name.startswith("check_") and inspect.getmodule(function) is module
)
"""The checks of `check_connector`, in their order."""


def check_connector(
    make_url: Callable[[], str],
    *,
    options: Mapping[str, Any] | None = None,
    processes: bool = True,
    checks: Iterable[Check] = CONNECTOR_CHECKS,
) -> None:
    """Run every check against one connector.

    Args:
        make_url: returns a URL that was not used before, at each call.
        options: for `KVLink.serve` and `KVLink.connect`.
        processes: readers are in a process of their own; False for connectors within one process.
        checks: those to run.

    Raises:
        CheckFailed: names the first behaviour that is missing.
    """
    peer: Peer = ProcessPeer() if processes else ThreadPeer(LinkCommands())
    try:
        for check in checks:
            run_check(check, Rig(make_url, options or {}, peer))
    finally:
        peer.close()


def run_check(check: Check, rig: Rig) -> None:
    """Run one check on a fresh rig, wait until all memory is free, and close the rig.

    It raises `CheckFailed` if the check raises any error, or leaves memory in use.
    """

    @functools.wraps(check)
    def checked() -> None:
        check(rig)
        rig.until_freed()

    try:
        run_checked(checked)
    finally:
        rig.close()
