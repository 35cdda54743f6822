"""`PrefixStore`: the longest prefix, a budget, leases, and waiting."""

from __future__ import annotations

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
    PagedTensor,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.copier import TorchCopier
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
    from collections.abc import Callable

    from omni_kvlink.lookup import Match

BIG = 1 << 30
Prompt = tuple[str, tuple[int, ...]]
"""A namespace and tokens."""
prompts = st.tuples(
    st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
)


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
def test_a_roi_that_is_no_prefix_is_refused(roi: list[bool]) -> None:
    """The K and V of a token depend on every token before it."""
    with pytest.raises(SchemaError, match="roi"):
        PrefixStore(BIG).select([1, 2, 3, 4], torch.tensor(roi))


def test_roi_marks_the_tokens_that_are_meant() -> None:
    store, tokens = PrefixStore(BIG), [5, 6, 7, 8]
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


def test_without_its_hidden_state_the_last_token_must_be_computed() -> None:
    store = PrefixStore(BIG)
    insert(store, [1, 2, 3])
    with store.select([1, 2, 3]) as match:
        assert (match.tokens, match.hidden) == (2, None)
        assert_right(match, [1, 2, 3])
    with store.select([1]) as match:
        assert match.tokens == 0
        assert match.data is None


@pytest.mark.parametrize(("length", "is_complete"), [(10, True), (8, True), (7, False)])
def test_hidden_states_of_the_last_tokens(length: int, is_complete: bool) -> None:
    store, tokens = PrefixStore(BIG), list(range(10))
    insert(store, tokens, states=3)  # of tokens 7, 8 and 9
    with store.select(tokens[:length]) as match:
        assert match.is_complete == is_complete
        assert_right(match, tokens[:length])


def test_hidden_states_may_come_later() -> None:
    store, tokens = PrefixStore(BIG), [1, 2, 3]
    insert(store, tokens)
    insert(store, tokens, states=1)
    with store.select(tokens) as match:
        assert match.is_complete
    insert(store, tokens)  # and what is less does not replace it
    with store.select(tokens) as match:
        assert match.is_complete
    assert store.stats()["prompts"] == 1


def test_what_a_longer_prompt_says_is_not_kept_twice() -> None:
    store = PrefixStore(BIG)
    insert(store, [1, 2, 3, 4])
    insert(store, [1, 2])
    assert store.stats()["prompts"] == 1
    assert store.stats()["used"] == 4 * ROW


def test_the_least_recently_used_makes_room() -> None:
    store = PrefixStore(3 * 4 * ROW)
    for first in (10, 20, 30):
        insert(store, range(first, first + 4))
    with store.select([10, 11, 12, 13]):  # used: now 20 is the oldest
        pass
    insert(store, range(40, 44))
    stats = store.stats()
    assert (stats["used"], stats["prompts"], stats["evicted"]) == (12 * ROW, 3, 1)
    for first, found in ((10, 3), (20, 0), (30, 3), (40, 3)):
        with store.select(range(first, first + 4)) as match:
            assert match.tokens == found
            assert_right(match, range(first, first + 4))


def test_what_is_on_lease_stays() -> None:
    store = PrefixStore(2 * 4 * ROW)
    insert(store, range(4))
    insert(store, range(10, 14))
    lease = store.select(range(4))
    store.select(range(10, 14)).release()  # the leased one is now the least recently used
    insert(store, range(20, 24))
    assert_right(lease, range(4))
    assert store.select([10, 11]).data is None  # the other one went, though used later
    with store.select(range(20, 24)), pytest.raises(CapacityError, match="not on lease") as error:
        insert(store, range(30, 34))
    assert (error.value.requested, error.value.free) == (4 * ROW, 0)
    assert store.stats()["pinned"] == 4 * ROW
    lease.release()
    lease.release()  # once is enough
    assert store.stats()["pinned"] == 0
    insert(store, range(30, 34))
    with pytest.raises(CapacityError):
        insert(store, range(100, 109))  # never fits
    assert store.stats()["prompts"] == 2  # and nothing was evicted for it


def test_a_forgotten_lease_is_loud() -> None:
    store = PrefixStore(BIG)
    insert(store, [1, 2, 3])
    match = store.select([1, 2, 3])
    # The lock itself: a finalizer that takes it while it is held here never returns.
    with pytest.warns(ResourceWarning, match="Match: 2 of 3"), store._lock:
        del match
    assert store.stats()["pinned"] == 0


def test_a_lease_of_an_entry_that_is_replaced_ends() -> None:
    store, tokens = PrefixStore(BIG), [1, 2, 3]
    keys, values = kv(tokens)
    store.insert(tokens, None, keys, values, None)
    with store.select(tokens) as match:
        assert match.tokens == 2
        store.insert(tokens, None, keys, values, hidden(tokens))
        assert store.stats()["pinned"]
    assert store.stats()["pinned"] == 0


def test_the_caller_may_write_to_its_tensors_again() -> None:
    store, tokens = PrefixStore(BIG), [1, 2, 3]
    keys, values = kv(tokens)
    last = hidden(tokens)
    store.insert(tokens, None, keys, values, last)
    for tensor in (*keys, *values, last):
        tensor.zero_()
    with store.select(tokens) as match:
        assert_right(match, tokens)


def test_borrowed_tensors_are_the_callers_own() -> None:
    store, tokens = PrefixStore(BIG), [1, 2, 3]
    keys, values = kv(tokens)
    store.insert(tokens, None, keys, values, copy=False)
    with store.select(tokens) as match:
        kept = match.keys[0]
        assert isinstance(kept, torch.Tensor)
        assert kept.data_ptr() == keys[0].data_ptr()


def test_pages_of_a_pool_are_copied_out() -> None:
    store, tokens = PrefixStore(BIG), [1, 2, 3]
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


def test_another_models_cache_is_refused() -> None:
    store = PrefixStore(BIG)
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
def test_what_is_no_namespace_is_refused(namespace: Any) -> None:
    store = PrefixStore(BIG)
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
def test_prompts_match_inside_a_namespace_only(others: list[str]) -> None:
    """All of a prompt, a part of it, and a longer one."""
    store, tokens = PrefixStore(BIG), list(range(10))
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


def test_tokens_are_no_namespace() -> None:
    """Not even those that are written as the digest of one."""
    store = PrefixStore(BIG)
    written = np.frombuffer(digest("a"), ">u4").tolist()
    insert(store, [1, 2, 3], namespace="a")
    with store.select([*written, 1, 2, 3]) as match:
        assert match.tokens == 0
    insert(store, [*written, 4, 5, 6])
    with store.select([4, 5, 6], namespace="a") as match:
        assert match.tokens == 0


def test_a_failure_is_of_its_namespace() -> None:
    store = PrefixStore(BIG)
    store.fail([1, 2], "out of memory", namespace="a")
    with pytest.raises(TransferFailed, match="out of memory"):
        store.select([1, 2], namespace="a", wait=True)
    with pytest.raises(TransferTimeout, match=r"these 2 tokens.*; 0 of them"):
        store.select([1, 2], namespace="b", wait=True)


def test_a_namespace_changes_no_number() -> None:
    def used(namespace: str) -> dict[str, int]:
        store = PrefixStore(6 * ROW)
        for prompt in ([1, 2, 3], [1, 2, 3, 4], [7, 8]):
            insert(store, prompt, states=1, namespace=namespace)
            store.select(prompt[:2], namespace=namespace).release()
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


def test_decode_first_waits_for_the_insert() -> None:
    store, tokens = PrefixStore(BIG), list(range(6))
    insert(store, tokens[:3])
    timer = once_awaited(store, lambda: insert(store, tokens, states=1))
    with store.select(tokens, wait=True, timeout=60) as match:
        assert match.is_complete
        assert_right(match, tokens)
    timer.join()


def test_waiting_ends_in_time_or_with_the_failure() -> None:
    store = PrefixStore(BIG)
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


def test_a_wait_that_is_interrupted_at_each_line_leaves_no_lock() -> None:
    traced = store_module.__file__, waits.__file__, *LOCKING
    for number in itertools.count():
        store = PrefixStore(BIG)

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


def test_many_threads() -> None:
    """Inserts, leases and evictions at once: every match is right, and no pin is left."""
    store = PrefixStore(40 * ROW)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        try:
            for _ in range(150):
                tokens = [seed % 2, *torch.randint(0, 3, (7,), generator=dice).tolist()]
                insert(store, tokens, states=2)
                prompt = [*tokens[:5], 1, 2]
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
    assert stats["pinned"] == 0
    assert stats["evicted"] > 0
    assert stats["used"] <= stats["budget"]


def test_tensors_of_a_device_are_complete_when_another_thread_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is inserted on a stream is read on others."""
    store, waited = PrefixStore(BIG), list[int]()

    class Recorded:
        def __init__(self, views: list[torch.Tensor]):
            self.count = len(views)

        def wait(self) -> None:
            waited.append(self.count)
            assert not store.covers(encode([1, 2], None))  # nobody has found them yet

    monkeypatch.setattr(TorchCopier, "record", lambda self, views: Recorded(views))
    insert(store, [1, 2])
    assert waited == [2 * LAYERS]
    assert store.covers(encode([1, 2], None))
