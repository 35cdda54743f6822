"""`python -m omni_kvlink.bench`."""

import sys

from .cli import main

sys.exit(main())
