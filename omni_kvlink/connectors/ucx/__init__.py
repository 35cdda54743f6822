"""UCX for a payload's bytes; the control messages go another way."""

from __future__ import annotations

INSTALL = "pip install 'omni-kvlink[ucx]'"


def unavailable() -> str | None:
    """Why UCX cannot be used here, with the cure, or None if it can; imports ucxx, so ask late."""
    try:
        from .worker import load

        load()
    except ImportError as error:
        return f"ucxx does not load ({error}); {INSTALL}"
    except Exception as error:  # its C++ side reports a broken installation in many types
        return f"ucxx is broken ({type(error).__name__}: {error}); {INSTALL}"
    return None
