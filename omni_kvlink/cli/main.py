"""`kvlink`: tools for the users of links."""

from __future__ import annotations

from omni_kvlink.cli.process import run_process


def main() -> int:
    """Run the command line of this process; return the exit status."""
    return run_process("kvlink", "omni_kvlink.cli.commands")
