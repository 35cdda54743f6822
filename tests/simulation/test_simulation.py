"""Thousands of short runs of the protocol, each decided by a seed: no wrong bytes, nothing leaks.

A failing seed is printed; `KVLINK_SEED=N pytest tests/simulation` replays it with its log.
`make test-all` runs 20,000 of them; `KVLINK_SEEDS=100000` sets another number.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pytest

from support.simulation.far import FarConsumer, FarProducer
from support.simulation.far_growing import FarGrowingReader
from support.simulation.growing_parties import GrowingReader, GrowingWriter
from support.simulation.kept import KEPT_KEYS, OUTCOMES, evict, withdraw, withdraw_all
from support.simulation.parties import Producer, SimConsumer
from support.simulation.world import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = int(os.environ.get("KVLINK_SEEDS", "20100"))
QUICK = 300
"""So many seeds are run by `make test`."""
ONLY = os.environ.get("KVLINK_SEED")
KEYS = "abc"
SEEDS_PER_TEST = 300
Parties: TypeAlias = tuple[type[Producer], type[SimConsumer]]
NEAR: Parties = Producer, SimConsumer
FAR: Parties = FarProducer, FarConsumer
FIRST_SEEDS = [
    pytest.param(first, marks=pytest.mark.slow if first >= QUICK else ())
    for first in range(0, SEEDS, SEEDS_PER_TEST)
]


class Scenario:
    """A producer that is restarted now and then, and three consumers that act at random."""

    def __init__(self, seed: int, producer: type[Producer], reader: type[SimConsumer]):
        self.clock, self._producer = Clock(seed), producer
        self.wild = self.clock.chance.random() < 0.3
        self.producers = [producer(self.clock)]
        self.readers = [reader(self.clock, f"reader {n}", wild=self.wild) for n in range(3)]

    def run(self) -> None:
        """Act eighty times in ten seconds, disconnect everybody, and check the final state."""
        for _ in range(80):
            self.clock.after(self.clock.chance.uniform(0, 10), self._act)
        self.clock.run(10.0)
        for reader in self.readers:
            reader.break_off()
        self.clock.run(15.0)
        for producer in self.producers:
            withdraw_all(producer)
        self.clock.run(30.0)
        self._check()

    def _act(self) -> None:
        chance, producer = self.clock.chance, self.producers[-1]
        reader, key = chance.choice(self.readers), chance.choice(KEYS)
        reader.connect(producer)
        readers, ttl = chance.randint(1, 2), chance.choice((0.3, 2.0, 5.0))
        streamed = chance.random() < 0.5
        grown_reader = GrowingReader if self._producer is Producer else FarGrowingReader
        actions: dict[str, tuple[int, Callable[[], object]]] = {
            "put": (6, partial(producer.put, key, readers, ttl)),
            "inline": (4, partial(producer.put_inline, key, readers, ttl)),
            "put_many": (3, partial(producer.put_many, chance.sample(KEYS, 2), readers, ttl)),
            "stream": (5, partial(producer.stream, key, readers, ttl)),
            # No transport repeats or reorders bytes that are read in place.
            "direct": (0 if self.wild else 4, partial(producer.direct, key, readers, ttl)),
            "grow": (4, partial(GrowingWriter, producer, key, readers, ttl)),
            "read": (10, partial(grown_reader, reader, key, chance.uniform(0, 2))),
            "get": (14, partial(reader.get, key, chance.uniform(0, 2), streamed=streamed)),
            **self._kept_actions(producer, reader),
            "fail": (1, partial(producer.fail, key)),
            "abort": (1, partial(reader.abort, key)),
            "reader dies": (1, reader.die),
            "cut": (3, reader.cut),
            "producer dies": (1, self._restart),
        }
        name = chance.choices(list(actions), [weight for weight, _ in actions.values()])[0]
        self.clock.record(name, key, reader.name)
        actions[name][1]()

    def _kept_actions(
        self, producer: Producer, reader: SimConsumer
    ) -> dict[str, tuple[int, Callable[[], object]]]:
        """What is done with payloads that are kept."""
        chance = self.clock.chance
        key, ttl = chance.choice(KEPT_KEYS), chance.choice((2.0, float("inf")))
        put = chance.choice((producer.put, producer.put_inline, producer.stream))
        some = chance.sample(KEPT_KEYS, 2)
        waits, streamed = chance.random() < 0.3, chance.random() < 0.5
        get = partial(reader.get, key, 3.0, streamed=streamed, waits=waits)
        return {
            "keep": (6, partial(put, key, None, ttl)),
            "keep many": (2, partial(producer.put_many, some, None, ttl)),
            "get kept": (14, get),
            "contains": (5, partial(reader.contains, key)),
            "withdraw": (3, partial(withdraw, producer, key)),
            "evict": (3, partial(evict, producer)),
        }

    def _restart(self) -> None:
        self.producers[-1].die()
        self.producers.append(self._producer(self.clock))

    def _check(self) -> None:
        """Check that every put and get has ended, and that no memory is in use."""
        for reader in self.readers:
            assert reader.open == 0, f"{reader.name} still waits for a get"
            assert reader.taken == 0, f"{reader.name} still uses memory"
            # On wires that keep the order, a stream continues or ends; it never stalls.
            late = reader.outcomes["layer timed out"] + reader.outcomes["chunk timed out"]
            assert self.wild or not late, reader.name
        for producer in self.producers:
            stats = producer.transfers.stats()
            if producer.alive:
                assert all(transfer.is_done for transfer in producer.reserved), stats
                assert producer.memory.taken == 0, stats
                assert producer.quota.stats()["blocks"] == 0, stats
                assert producer.quota.stats()["mapped"] == 0, stats
                assert (stats["live"], stats["waiting"], stats["pinned"]) == (0, 0, 0), stats
            assert stats["leased"] == 0, stats
            assert stats["kept"] == 0 or not producer.alive, stats


@pytest.mark.parametrize("parties", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_nothing_wrong_is_ever_seen(first: int, parties: Parties) -> None:
    """Near: both sides map the same memory. Far: the offered bytes are fetched in ranges."""
    seeds = [int(ONLY)] if ONLY else range(first, min(first + SEEDS_PER_TEST, SEEDS))
    outcomes, lanes = Counter[str](), Counter[str]()
    for seed in seeds:
        scenario = Scenario(seed, *parties)
        try:
            scenario.run()
        except BaseException:
            print(f"KVLINK_SEED={seed} pytest tests/simulation replays this:")
            print(*scenario.clock.log, sep="\n")
            raise
        if seed % 10 == 0:
            gc.collect()  # tests run without the collector, and scenarios are cycles
        for reader in scenario.readers:
            outcomes.update(reader.outcomes)
            lanes.update(getattr(reader, "lane_counters", {}))
        for producer in scenario.producers:
            stats = producer.transfers.stats()
            outcomes.update({name: stats[name] for name in ("withdrawn", "evicted")})
    if not ONLY:
        names = ["read", "failed", "timed out", "stream failed", "inline", "grown", "left"]
        names += ["was released", *OUTCOMES]
        assert min(outcomes[name] for name in names) > 20  # each outcome occurred
        assert parties == NEAR or min(outcomes["begins later"], outcomes["late"]) > 2
        far = outcomes["resumed"], outcomes["kept_nbytes"], lanes["lost"], lanes["again_nbytes"]
        assert parties == NEAR or min(far) > 2
