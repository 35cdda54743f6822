"""`PoolPages`: the pages of one of SGLang's host pools, as tensors in the pool's own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    import torch


class PoolPages:
    """The pages of a host pool by their first slot, each as views by name; nothing is copied.

    Most pools have one view of a page, `page`, contiguous or not. Those of recurrent states have
    one for each state, and those of K and V of different widths have `k` and `v`.

    Attributes:
        slots: the number of slots of a page, in the indices that SGLang passes.
        layout: the pool's class and memory layout, its layers, and each view's shape and dtype: all
            that decides what the bytes of a page are, beside model and shard.

    Raises:
        SchemaError: the pool has no page that is a view: a layout that lies in pieces, a pool that
            SGLang does not store either.
    """

    def __init__(self, pool: Any, name: str):
        self._pool = pool
        self.slots = int(getattr(pool, "logical_page_size", pool.page_size))
        try:
            first = self.tensors(0)
        except (NotImplementedError, ValueError, TypeError) as error:  # TypeError: it has no memory
            raise _refusal(pool, name, str(error)) from None
        for tensor in first.values():
            # A page that was put together is a tensor of its own.
            if tensor.numel() and tensor.untyped_storage().nbytes() == tensor.nbytes:
                raise _refusal(pool, name, "a page is not in one piece of memory")
        self.layout = " ".join((*_facts(pool), *map(_shape_of, first.items())))
        self.dtypes = {tensor.dtype for tensor in first.values() if tensor.numel()}

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The page whose first slot is `slot`; writing to the views writes to the pool."""
        pool = self._pool
        if hasattr(pool, "temporal_buffer"):
            return self._states(slot)
        if hasattr(pool, "v_head_dim") and pool.v_head_dim != pool.head_dim:
            return {"k": self._rows(pool.k_buffer, slot), "v": self._rows(pool.v_buffer, slot)}
        return {"page": pool.get_data_page(slot, flat=False)}

    def of_flat(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A page that SGLang has made flat, with the shape that it has in the pool.

        Raises:
            SchemaError: it has another size, or this pool's pages are several tensors.
        """
        [(name, page), *more] = self.tensors(0).items()
        if more or flat.numel() != page.numel() or flat.dtype != page.dtype:
            raise SchemaError(f"a flat page of {flat.numel()} × {flat.dtype}: not of {self.layout}")
        return {name: flat.view(page.shape)}

    def _states(self, slot: int) -> dict[str, torch.Tensor]:
        pool = self._pool
        if not pool.layout.startswith("page_first"):
            raise ValueError(f"Unsupported layout: {pool.layout}")
        named = {"temporal": pool.temporal_buffer}
        named.update((f"conv{number}", state) for number, state in enumerate(pool.conv_buffer))
        named.update(
            (f"state{number}", state) for number, state in enumerate(pool.slot_state_buffers)
        )
        return {
            name: state[slot : slot + self.slots] for name, state in named.items() if state.numel()
        }

    def _rows(self, buffer: torch.Tensor, slot: int) -> torch.Tensor:
        layout = self._pool.layout
        if layout == "page_first":
            return buffer[slot : slot + self.slots]
        if layout == "page_first_direct":
            return buffer[slot // self.slots : slot // self.slots + 1]
        raise ValueError(f"Unsupported layout: {layout}")


def _facts(pool: Any) -> list[str]:
    layers = f"layers={getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}"
    tag = getattr(pool, "storage_format_tag", None) or ""
    return [type(pool).__name__, pool.layout, layers, f"slots={pool.page_size}", f"format={tag}"]


def _shape_of(named: tuple[str, torch.Tensor]) -> str:
    name, tensor = named
    return f"{name}:{tensor.dtype}{list(tensor.shape)}"


def _refusal(pool: Any, name: str, reason: str) -> SchemaError:
    return SchemaError(
        f"host pool {name} ({type(pool).__name__}, layout {pool.layout}) has no pages to store: "
        f"{reason}; start SGLang with --hicache-mem-layout page_first"
    )
