"""`python -m omni_kvlink.testing`: a `Peer` in a process of its own."""

from .peer import main

main()
