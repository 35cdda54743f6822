"""`python -m omni_kvlink.testing`: a `Peer` in a process of its own."""

from omni_kvlink.testing.peer import main

main()
