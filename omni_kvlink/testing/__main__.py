"""`python -m omni_kvlink.testing`: a conformance peer in a process of its own."""

import os

from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import serve

serve(LinkCommands(), concurrent=True)
os._exit(0)  # closes nothing: that a process ends without it is part of the tests
