"""Fault points of the library: their names, and how to arm them in a child process.

    subprocess.Popen(command, env=faults.armed({"publish.before": "kill"}))

Actions are `kill` (SIGKILL), `stop` (SIGSTOP, once), `sleep:SECONDS` and `raise` (RuntimeError).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.fault_points import POINTS as POINTS
from omni_kvlink.connectors.runtime.fault_points import VARIABLE as VARIABLE
from omni_kvlink.connectors.runtime.fault_points import parse
from omni_kvlink.connectors.runtime.fault_points import point as point

if TYPE_CHECKING:
    from collections.abc import Mapping


def armed(faults: Mapping[str, str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """`env`, or this process's environment, with actions by the name of a fault point.

    It raises `ValueError` for a name that is no fault point.
    """
    text = ",".join(f"{name}={action}" for name, action in faults.items())
    parse(text)
    return {**(os.environ if env is None else env), VARIABLE: text}
