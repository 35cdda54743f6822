"""The public face of the fault points: where they are, and how to arm them in a child process.

    subprocess.Popen(command, env=faults.armed({"publish.before": "kill"}))

Actions are `kill` (SIGKILL), `stop` (SIGSTOP), `sleep:SECONDS` and `raise` (RuntimeError).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from omni_kvlink.connectors.runtime.fault_points import POINTS as POINTS
from omni_kvlink.connectors.runtime.fault_points import VARIABLE as VARIABLE
from omni_kvlink.connectors.runtime.fault_points import parse
from omni_kvlink.connectors.runtime.fault_points import point as point


def armed(faults: Mapping[str, str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment (this process's, unless given) in which a child does `faults`.

    Raises:
        ValueError: there is no such point.
    """
    text = ",".join(f"{name}={action}" for name, action in faults.items())
    parse(text)
    return {**(os.environ if env is None else env), VARIABLE: text}
