"""`python -m omni_kvlink.bench`."""

import sys

from omni_kvlink.bench.cli import main

sys.exit(main())
