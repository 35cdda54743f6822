"""`python -m support.network.netns_peer NAMESPACE`: a conformance peer in a network namespace."""

from __future__ import annotations

import runpy
import sys

from support.network.cable import enter_namespace

if __name__ == "__main__":
    enter_namespace(sys.argv.pop())
    runpy.run_module("support.faults.peer_commands", run_name="__main__")
