"""`PrefixStore`: the longest prefix, a budget, leases, and waiting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompts import LAYERS, ROW, assert_right, hidden, insert, kv

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
from omni_kvlink.lookup.tokens import PrefixIndex, common, count, encode
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable

BIG = 1 << 30
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(prompts, max_size=12), st.lists(prompts, max_size=4), prompts)
def test_the_longest_prefix_is_found(
    added: list[list[int]], gone: list[list[int]], prompt: list[int]
) -> None:
    """Against looking at every one of them."""
    index, keys = PrefixIndex(), {encode(prompt, None) for prompt in added}
    for key in keys:
        index.add(key)
    for key in keys & {encode(prompt, None) for prompt in gone}:
        index.remove(key)
        keys.discard(key)
    key = encode(prompt, None)
    found, other = index.longest(key)
    assert found == max((common(key, one) for one in keys), default=0)
    assert not found or (other in keys and common(key, other) == found)
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
    with pytest.warns(ResourceWarning, match="Match: 2 of 3"):
        del match
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


def once_awaited(store: PrefixStore, call: Callable[[], None]) -> threading.Thread:
    """Call this when a thread waits for the store."""

    def run() -> None:
        until(lambda: bool(store._changed._waiters), "a thread waits")  # type: ignore[attr-defined]
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
