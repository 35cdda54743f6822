"""`PrefixStore`: the longest prefix, eviction, leases, and waiting."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_kvlink import (
    BlockTable,
    CapacityError,
    ClosedError,
    KVLink,
    KVProducer,
    PagedTensor,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.lookup import PrefixStore
from omni_kvlink.lookup import store as store_module
from omni_kvlink.lookup.tokens import (
    DIGEST_SIZE,
    NO_NAMESPACE,
    PrefixIndex,
    common,
    count,
    digest,
    encode,
)
from omni_kvlink.system import waits
from omni_kvlink.testing.rig import until
from support.lookup.prompts import LAYERS, ROW, assert_right, hidden, insert, kv
from support.processes.line_interrupts import LOCKING, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.lookup import Match

# Reaches into _lock: a test holds it while a match is dropped; _watchers: see once_awaited.
QUOTA = 1 << 20
LONG = 1500
"""Tokens of a prompt of which the memory of `small` holds three."""
_numbers = itertools.count()
Prompt = tuple[str, tuple[int, ...]]
"""A namespace and tokens."""
prompts = st.tuples(
    st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
)


@pytest.fixture
def link() -> Iterator[KVProducer]:
    with KVLink.serve(f"inproc://store-{next(_numbers)}", quota=QUOTA) as link:
        yield link


@pytest.fixture
def store(link: KVProducer) -> PrefixStore:
    return PrefixStore(link)


def shared(a: Prompt, b: Prompt) -> int:
    """The number of tokens that two prompts begin with, as their lists say it."""
    equal = (mine == theirs for mine, theirs in zip(a[1], b[1], strict=False))
    return sum(itertools.takewhile(bool, equal)) if a[0] == b[0] else 0


@given(st.lists(prompts, max_size=16), st.lists(prompts, max_size=4), prompts)
def test_the_longest_prefix_is_found(
    added: list[Prompt], gone: list[Prompt], prompt: Prompt
) -> None:
    """Against looking at every one of them."""
    keys = {encode(tokens, None, name): (name, tokens) for name, tokens in added}
    index = PrefixIndex()
    for key in keys:
        index.add(key)
    for name, tokens in gone:
        if keys.pop(encode(tokens, None, name), None):
            index.remove(encode(tokens, None, name))
    key = encode(prompt[1], None, prompt[0])
    found, other = index.longest(key)
    assert found == max((shared(prompt, one) for one in keys.values()), default=0)
    assert not found or shared(prompt, keys[other]) == found
    assert key not in keys or other == key


def test_tokens_are_compared_as_numbers_not_as_bytes() -> None:
    """255 and 256 have a byte in common."""
    assert common(encode([1, 255], None), encode([1, 256], None)) == 1
    assert encode([255], None) < encode([256], None)
    assert count(encode(torch.tensor([2**32 - 1]), None)) == 1


@pytest.mark.parametrize(
    "tokens", [[], [1.5], [[1]], [-1], [2**32], torch.tensor(3), torch.tensor([True])]
)
def test_what_are_no_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(SchemaError, match="tokens"):
        encode(tokens, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "roi", [[False] * 4, [True, False, True, False], [False, True, True, True], [True] * 3]
)
def test_a_roi_that_is_no_prefix_is_refused(store: PrefixStore, roi: list[bool]) -> None:
    """The K and V of a token depend on every token before it."""
    with pytest.raises(SchemaError, match="roi"):
        store.select([1, 2, 3, 4], torch.tensor(roi))


def test_roi_marks_the_tokens_that_are_meant(store: PrefixStore) -> None:
    tokens = [5, 6, 7, 8]
    roi = torch.tensor([True, True, True, False])
    keys, values = kv(tokens[:3])
    store.insert(tokens, roi, keys, values, hidden(tokens[:3]))
    with store.select(tokens) as match:
        assert match.tokens == 3
        assert_right(match, tokens)
    with store.select(tokens, roi) as match:
        assert match.is_complete
        assert_right(match, tokens[:3])
    with pytest.raises(SchemaError, match="kv_lens"):  # K and V of other tokens than marked
        store.insert(tokens, None, keys, values)


def test_without_its_hidden_state_the_last_token_must_be_computed(store: PrefixStore) -> None:
    insert(store, [1, 2, 3])
    with store.select([1, 2, 3]) as match:
        assert (match.tokens, match.hidden) == (2, None)
        assert_right(match, [1, 2, 3])
    with store.select([1]) as match:
        assert match.tokens == 0
        assert match.data is None


@pytest.mark.parametrize(("length", "is_complete"), [(10, True), (8, True), (7, False)])
def test_hidden_states_of_the_last_tokens(
    store: PrefixStore, length: int, is_complete: bool
) -> None:
    tokens = list(range(10))
    insert(store, tokens, states=3)  # of tokens 7, 8 and 9
    with store.select(tokens[:length]) as match:
        assert match.is_complete == is_complete
        assert_right(match, tokens[:length])


def test_hidden_states_may_come_later(store: PrefixStore) -> None:
    tokens = [1, 2, 3]
    insert(store, tokens)
    insert(store, tokens, states=1)
    with store.select(tokens) as match:
        assert match.is_complete
    insert(store, tokens)  # and what is less does not replace it
    with store.select(tokens) as match:
        assert match.is_complete
    assert store.stats()["prompts"] == 1


def test_what_a_longer_prompt_says_is_not_kept_twice(store: PrefixStore) -> None:
    insert(store, [1, 2, 3, 4])
    insert(store, [1, 2])
    assert store.stats()["prompts"] == 1
    assert store.link.stats()["transfers"]["kept"] == 1


def long(first: int) -> range:
    """A prompt of which the link's memory holds three."""
    return range(first, first + LONG)


def has(store: PrefixStore, prompt: range) -> bool:
    with store.select(prompt) as match:
        return match.tokens > 0


def test_the_least_recently_used_makes_room(store: PrefixStore) -> None:
    for first in (10000, 20000, 30000):
        insert(store, long(first))
    with store.select(long(10000)):  # used: now 20000 is the oldest
        pass
    insert(store, long(40000))
    stats = store.stats()
    assert (stats["prompts"], stats["evicted"]) == (3, 1)
    for first, found in ((10000, LONG - 1), (20000, 0), (30000, LONG - 1), (40000, LONG - 1)):
        with store.select(long(first)) as match:
            assert match.tokens == found
            assert_right(match, long(first))


def test_an_insert_of_what_is_there_is_a_use(store: PrefixStore) -> None:
    for first in (10000, 20000, 30000):
        insert(store, long(first))
    insert(store, long(10000)[:9])
    insert(store, long(40000))
    assert [has(store, long(first)) for first in (10000, 20000)] == [True, False]


def test_what_is_on_lease_stays(store: PrefixStore) -> None:
    for first in (10000, 20000, 30000):
        insert(store, long(first))
    lease = store.select(long(10000))
    for first in (20000, 30000):  # the leased one is now the least recently used
        store.select(long(first)).release()
    insert(store, long(40000))
    assert_right(lease, long(10000))
    assert store.select([20000, 20001]).data is None  # the other one went, though used later
    with (
        store.select(long(30000)),
        store.select(long(40000)),
        pytest.raises(CapacityError) as error,
    ):
        insert(store, long(50000))
    assert error.value.requested > LONG * ROW > error.value.free
    lease.release()
    lease.release()  # once is enough
    insert(store, long(50000))
    with pytest.raises(CapacityError):
        insert(store, range(QUOTA // ROW))  # never fits
    assert store.stats()["prompts"] == 3  # and nothing was evicted for it
    with pytest.raises(ClosedError, match="was released"):
        lease.keys  # noqa: B018 (a property that raises)


def test_many_releases_before_inserts(store: PrefixStore) -> None:
    """What was released can be evicted by the next insert, which waits for nothing."""
    for first in range(10000, 10020):
        tokens = range(first, first + 3 * LONG)  # one fills the memory
        insert(store, tokens)
        assert has(store, tokens)


def test_a_view_keeps_its_memory(store: PrefixStore) -> None:
    """Beyond the release of its match: what a caller keeps is not written over."""
    insert(store, long(10000))
    with store.select(long(10000)) as match:
        kept = match.keys[0]
    for first in (20000, 30000, 40000, 50000):
        insert(store, long(first))
    assert torch.equal(torch.as_tensor(kept), kv(long(10000)[:-1])[0][0])
    del kept
    until(lambda: store.link.stats()["transfers"]["kept"] == 3, "nothing else is kept")


def test_what_is_withdrawn_or_fails_is_not_found(store: PrefixStore) -> None:
    """By whom ever: a reader that found a wrong byte, or the owner of the link."""
    for first in (10000, 20000, 30000):
        insert(store, long(first), states=1)
    for first, end in ((10000, store.link.withdraw), (20000, store.link.abort)):
        end(store.find(encode(long(first), None)).entry)
        assert not has(store, long(first))
    assert has(store, long(30000))
    assert (store.stats()["prompts"], store.stats()["evicted"]) == (1, 0)
    insert(store, long(10000), states=1)
    with store.select(long(10000)) as match:
        assert_right(match, long(10000))


def test_a_forgotten_lease_is_loud(store: PrefixStore) -> None:
    for first in (10000, 20000, 30000):
        insert(store, long(first))
    matches = [store.select(long(first)) for first in (10000, 20000, 30000)]
    # store._lock, and the link's: a finalizer that takes one while it is held here never returns.
    end: Any = store.link._end
    with pytest.warns(ResourceWarning, match=f"Match: {LONG - 1} of {LONG}"), store._lock, end.lock:
        del matches
    until(lambda: can_insert(store, long(40000)), "their memory is free")


def can_insert(store: PrefixStore, tokens: range) -> bool:
    with contextlib.suppress(CapacityError):
        insert(store, tokens)
    return has(store, tokens)


def test_a_lease_of_an_entry_that_is_replaced_ends(store: PrefixStore) -> None:
    tokens = list(long(10000))
    insert(store, tokens)
    with store.select(tokens) as match:
        assert match.tokens == LONG - 1
        insert(store, tokens, states=1)
        assert_right(match, tokens)
        with store.select(tokens) as other:
            assert other.is_complete
    assert store.link.stats()["transfers"]["kept"] == 1
    assert store.link.stats()["memory"]["blocks"] == 1


def test_the_caller_may_write_to_its_tensors_again(store: PrefixStore) -> None:
    tokens = [1, 2, 3]
    keys, values = kv(tokens)
    last = hidden(tokens)
    store.insert(tokens, None, keys, values, last)
    for tensor in (*keys, *values, last):
        tensor.zero_()
    with store.select(tokens) as match:
        assert_right(match, tokens)


def test_a_match_is_views_of_what_is_kept(store: PrefixStore) -> None:
    """Two matches are the same bytes, and a short one is the beginning of the long one's."""
    insert(store, long(10000), states=2)
    used = store.link.stats()["memory"]["used"]
    with store.select(long(10000)) as whole, store.select(long(10000)[:700]) as part:
        assert (whole.tokens, part.tokens) == (LONG, 699)
        for views, parts in ((whole.keys, part.keys), (whole.values, part.values)):
            for view, first in zip(views, parts, strict=True):
                assert torch.as_tensor(view).data_ptr() == torch.as_tensor(first).data_ptr()
        assert store.link.stats()["memory"]["used"] == used


def test_pages_of_a_pool_are_copied_out(store: PrefixStore) -> None:
    tokens = [1, 2, 3]
    keys, values = kv(tokens)
    table = BlockTable.of_blocks([4, 1], block_size=2, tokens=3)
    pools = [[torch.zeros(6, 2, *layer.shape[1:]) for layer in part] for part in (keys, values)]
    paged = [[PagedTensor(pool, table) for pool in part] for part in pools]
    for views, part in zip(paged, (keys, values), strict=True):
        for view, layer in zip(views, part, strict=True):
            view.fill(layer)
    store.insert(tokens, None, paged[0], paged[1], hidden(tokens))
    for pool in pools[0]:
        pool.zero_()
    with store.select(tokens) as match:
        assert_right(match, tokens)


def test_another_models_cache_is_refused(store: PrefixStore) -> None:
    insert(store, [1, 2, 3])
    keys, values = kv([4, 5])
    with pytest.raises(SchemaError, match=f"2 layers.*holds {LAYERS} layers"):
        store.insert([4, 5], None, keys[:2], values[:2])
    with pytest.raises(SchemaError, match="bfloat16"):
        store.insert([4, 5], None, [k.bfloat16() for k in keys], [v.bfloat16() for v in values])
    with pytest.raises(SchemaError, match="hidden"):
        store.insert([4, 5], None, keys, values, hidden([1, 2, 3]))


# ---- namespaces

NAMES: list[Any] = [
    *("a", '"a"', '{"a":null}', 'json {"a":null}', "bytes a", "\ud800"),
    *(b"a", b"", b'json {"a":null}', b"text a"),
    *({"a": None}, {"a": "b"}, {"b": "a"}, {}),
]


def test_each_namespace_has_a_digest_of_its_own() -> None:
    """Values of different types are different namespaces."""
    digests = {digest(name) for name in NAMES}
    assert len(digests) == len(NAMES)
    assert {len(one) for one in digests} == {DIGEST_SIZE}
    assert digest("") == NO_NAMESPACE
    assert NO_NAMESPACE not in digests


def test_the_order_of_a_mapping_does_not_count() -> None:
    one = {"salt": "s", "rope": {"type": "yarn", "factor": 4.0}}
    other = {"rope": {"factor": 4.0, "type": "yarn"}, "salt": "s"}
    assert list(one) != list(other)
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "namespace",
    [
        None,
        3,
        ["a"],
        bytearray(b"a"),
        {1: "a"},
        {"a": {1: "b"}},
        {"a": {"b"}},
        {"a": (1, 2)},
        {"a": b"b"},
        {"a": float("nan")},
        {"a": torch.bfloat16},
    ],
    ids=str,
)
def test_what_is_no_namespace_is_refused(store: PrefixStore, namespace: Any) -> None:
    with pytest.raises(SchemaError, match="namespace"):
        insert(store, [1, 2], namespace=namespace)
    with pytest.raises(SchemaError, match="namespace"):
        store.select([1, 2], namespace=namespace)
    with pytest.raises(SchemaError, match="namespace"):
        store.fail([1, 2], "no", namespace=namespace)
    assert store.stats()["prompts"] == 0


@pytest.mark.parametrize("position", range(DIGEST_SIZE))
def test_every_byte_of_the_digest_counts(position: int) -> None:
    key, index = encode([1, 2, 3], None, "a"), PrefixIndex()
    other = bytes(byte ^ (number == position) for number, byte in enumerate(key))
    assert common(key, other) == 0
    index.add(other)
    assert index.longest(key) == (0, b"")
    index.add(key)
    assert index.longest(other) == (3, other)


def alike(name: str) -> str:
    """Another namespace whose digest has the same first byte."""
    first = digest(name)[0]
    return next(each for each in map(str, itertools.count()) if digest(each)[0] == first)


def inserted_as(match: Match) -> object:
    return match.data and match.data.metadata.extra["namespace"]


@pytest.mark.parametrize("others", [[], [""], ["c"], [alike("a")], ["", alike("a"), "b"]])
def test_prompts_match_inside_a_namespace_only(store: PrefixStore, others: list[str]) -> None:
    """All of a prompt, a part of it, and a longer one."""
    tokens = list(range(10))
    for name in others:
        insert(store, tokens, states=4, namespace=name, extra={"namespace": name})
    selected = (tokens, tokens[:8], [*tokens, 1], [*tokens[:5], 9])
    for prompt in selected:
        with store.select(prompt, namespace="a") as match:
            assert (match.tokens, match.data) == (0, None)
    insert(store, tokens, states=4, namespace="a", extra={"namespace": "a"})
    for name in ["a", *others]:
        for prompt, found in zip(selected, (10, 8, 10, 5), strict=True):
            with store.select(prompt, namespace=name) as match:
                assert (match.tokens, inserted_as(match)) == (found, name)
                assert_right(match, prompt)
    assert store.stats()["prompts"] == 1 + len(others)


def test_tokens_are_no_namespace(store: PrefixStore) -> None:
    """Not even those that are written as the digest of one."""
    written = np.frombuffer(digest("a"), ">u4").tolist()
    insert(store, [1, 2, 3], namespace="a")
    with store.select([*written, 1, 2, 3]) as match:
        assert match.tokens == 0
    insert(store, [*written, 4, 5, 6])
    with store.select([4, 5, 6], namespace="a") as match:
        assert match.tokens == 0


def test_a_failure_is_of_its_namespace(store: PrefixStore) -> None:
    store.fail([1, 2], "out of memory", namespace="a")
    with pytest.raises(TransferFailed, match="out of memory"):
        store.select([1, 2], namespace="a", wait=True)
    with pytest.raises(TransferTimeout, match=r"these 2 tokens.*; 0 of them"):
        store.select([1, 2], namespace="b", wait=True)


def test_a_namespace_changes_no_number() -> None:
    def used(namespace: str) -> dict[str, int]:
        with KVLink.serve(f"inproc://store-{next(_numbers)}", quota=QUOTA) as link:
            store = PrefixStore(link)
            for first in (10000, 20000, 30000, 40000):
                insert(store, long(first), states=1, namespace=namespace)
                store.select(long(first)[:2], namespace=namespace).release()
            store.select([9], namespace=namespace).release()
            return store.stats()

    assert used("") == used("a")
    assert used("")["evicted"] > 0


def once_awaited(store: PrefixStore, call: Callable[[], None]) -> threading.Thread:
    """Call this when a thread waits for the store."""

    def run() -> None:
        # A thread that waits has no effect that shows before the store changes.
        until(lambda: bool(store._watchers), "a thread waits")
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_decode_first_waits_for_the_insert(store: PrefixStore) -> None:
    tokens = list(range(6))
    insert(store, tokens[:3])
    timer = once_awaited(store, lambda: insert(store, tokens, states=1))
    with store.select(tokens, wait=True, timeout=60) as match:
        assert match.is_complete
        assert_right(match, tokens)
    timer.join()


def test_waiting_ends_in_time_or_with_the_failure(store: PrefixStore) -> None:
    insert(store, [1, 2, 3])
    with pytest.raises(TransferTimeout, match="2 of them are here") as late:
        store.select([1, 2, 9], wait=True, timeout=0.05)
    assert late.value.phase == "never announced"
    timer = once_awaited(store, lambda: store.fail([1, 2, 9], "out of memory"))
    with pytest.raises(TransferFailed, match="out of memory"):
        store.select([1, 2, 9], wait=True, timeout=60)
    timer.join()
    with pytest.raises(TransferFailed):  # a later caller, too
        store.select([1, 2, 9], wait=True, timeout=60)
    with store.select([1, 2, 9]) as match:  # without waiting, the longest match is returned
        assert match.tokens == 2
    insert(store, [1, 2, 9])
    with store.select([1, 2, 9], wait=True) as match:
        assert_right(match, [1, 2, 9])


def test_a_wait_that_is_interrupted_at_each_line_leaves_no_lock(link: KVProducer) -> None:
    traced = store_module.__file__, waits.__file__, *LOCKING
    for number in itertools.count():
        store = PrefixStore(link)

        def wait(store: PrefixStore = store) -> None:
            with pytest.raises(TransferTimeout):
                store.select([1, 2], wait=True, timeout=0.001)

        is_interrupted = interrupted(number, wait, [], traced=traced)
        inserting = threading.Thread(target=insert, args=(store, [1, 2]), daemon=True)
        inserting.start()
        inserting.join(20)
        assert not inserting.is_alive(), number
        if not is_interrupted:
            break


def test_many_threads(store: PrefixStore) -> None:
    """Inserts, leases and evictions at once: every match is right, and no lease is left."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                tokens = [seed % 2, *torch.randint(0, 3, (LONG // 4,), generator=dice).tolist()]
                with contextlib.suppress(CapacityError):  # the others have leases
                    insert(store, tokens, states=2)
                prompt = [*tokens[:300], 1, 2]
                with store.select(prompt) as match:
                    assert_right(match, prompt)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    stats = store.stats()
    assert stats["evicted"] > 0
    assert stats["prompts"] == store.link.stats()["transfers"]["kept"]


def test_threads_insert_the_same_prompt(store: PrefixStore) -> None:
    """One of their payloads is kept, with hidden states if any had them."""
    for first in range(20):
        tokens = range(100 * first, 100 * first + 9)
        threads = [
            threading.Thread(target=insert, args=(store, tokens), kwargs={"states": states})
            for states in (0, 2, 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with store.select(tokens) as match:
            assert_right(match, tokens)
            assert match.is_complete
    assert store.link.stats()["transfers"]["kept"] == store.stats()["prompts"] == 20
