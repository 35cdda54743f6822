"""A process with one side of a lookup, to kill: `killed_producer.py SIDE MINE THEIRS SOCKETS`."""

from __future__ import annotations

import sys

import torch

from omni_kvlink import KVLink
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from omni_kvlink.payload.views import dense
from support.lookup.prompts import insert, kv

TOKENS = list(range(50))


def read_twice(lookup: LookupConsumer) -> None:
    """Print what a match is, and later whether its ninth token was overwritten."""
    prompt = [*TOKENS[:40], 7, 7]
    with lookup.select(prompt, timeout=60) as match:
        [view, *_] = match.keys
        assert view is not None
        key = dense(view)
        print(match.tokens, torch.equal(key, kv(TOKENS[:40])[0][0]), flush=True)
        sys.stdin.readline()
        print(bool((key[8] == 77.0).all()), flush=True)


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
            if side == "reader":
                read_twice(lookup)
                return
            match = lookup.select(TOKENS, timeout=60)
            print(match.tokens, flush=True)
            sys.stdin.readline()
            match.release()


if __name__ == "__main__":
    main()
