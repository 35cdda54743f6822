"""A process with one side of a lookup, to kill: `killed_producer.py SIDE MINE THEIRS SOCKETS`."""

from __future__ import annotations

import sys

from omni_kvlink import KVLink
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from support.lookup.prompts import insert

TOKENS = list(range(50))


def main() -> None:
    side, mine, theirs, sockets = sys.argv[1:]
    with KVLink.serve(mine, directory=sockets) as link:
        print("serving", flush=True)
        peer = KVLink.connect(theirs, timeout=60, directory=sockets)
        if side == "producer":
            store = PrefixStore(link)
            insert(store, TOKENS, states=1)
            with LookupProducer(store, [peer], model="m"):
                print("ready", flush=True)
                sys.stdin.readline()
            return
        with LookupConsumer(link, [peer], model="m") as lookup:
            match = lookup.select(TOKENS, timeout=60)
            print(match.tokens, flush=True)
            sys.stdin.readline()
            match.release()


if __name__ == "__main__":
    main()
