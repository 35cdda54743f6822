"""`python -m omni_kvlink.cli` is `kvlink`."""

import sys

from omni_kvlink.cli.main import main

sys.exit(main())
