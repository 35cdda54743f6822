"""Re-exports for tests that do not import from `paged_fixtures` yet."""

from paged_fixtures import *  # noqa: F403
from paged_fixtures import expected_bytes as wanted  # noqa: F401
