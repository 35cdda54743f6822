"""What several tests share: `from support.faults.harness import Field`."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""Of programs that tests start by path."""
