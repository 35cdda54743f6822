"""`kvlink-bench`: how fast a link is on this machine, and whether it is exact."""

from __future__ import annotations

from omni_kvlink.cli.process import run_process


def main() -> int:
    """Run the command line of this process; return the exit status."""
    return run_process("kvlink-bench", "omni_kvlink.bench.commands", scratch=True)
