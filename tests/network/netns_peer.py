"""`python -m netns_peer NAMESPACE`: a conformance peer in a network namespace."""

from __future__ import annotations

import runpy
import sys

from cable import enter_namespace

if __name__ == "__main__":
    enter_namespace(sys.argv.pop())
    runpy.run_module("peer_commands", run_name="__main__")
