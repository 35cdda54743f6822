"""The part of a language model that a rank holds: heads and inner columns, rows, and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from omni_kvlink.models.bagel.layers import ALL_LAYERS, LayerSplit
from omni_kvlink.models.bagel.sequence import ALL_ROWS, SequenceSplit

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import LanguageConfig


def _identity(x: Tensor) -> Tensor:
    return x  # the sum over a single rank


@dataclass(frozen=True)
class Split:
    """One rank of those that hold a language model together.

    `total` sums rows over all tensor ranks, with the same bits on each; all call it in the same
    order. Each may be several ranks that divide the rows of an image (`sequence`), and the layers
    (`pipeline`).
    """

    rank: int = 0
    degree: int = 1
    total: Callable[[Tensor], Tensor] = _identity
    sequence: SequenceSplit = ALL_ROWS
    pipeline: LayerSplit = ALL_LAYERS

    def check(self, config: LanguageConfig) -> None:
        """Raise ValueError unless every rank gets as much as the others."""
        kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
        if (kv_heads % self.degree and self.degree % kv_heads) or heads % self.degree:
            raise ValueError(
                f"{heads} heads and {kv_heads} KV heads on {self.degree} tensor ranks: choose a "
                "tensor_parallel_size that divides both, or a multiple of the KV heads"
            )
        if config.intermediate_size % self.degree:
            raise ValueError(
                f"intermediate_size {config.intermediate_size} on {self.degree} tensor ranks: "
                "choose a tensor_parallel_size that divides it"
            )
        self.sequence.check(len(self.part(heads)), len(self.part(kv_heads)))
        self.pipeline.check(config.num_hidden_layers)

    def part(self, count: int, size: int = 1) -> range:
        """Return this rank's rows of `count` items (heads, or inner columns) of `size` rows each.

        Neighbours share an item if there are fewer items than ranks.
        """
        start = self.rank * count // self.degree
        return range(start * size, (start + max(1, count // self.degree)) * size)


WHOLE = Split()


@dataclass(frozen=True)
class Cut:
    """A part, at `index`, of a checkpoint's tensor with the shape `full_shape`."""

    full_shape: tuple[int, ...]
    index: tuple[slice, ...]


class CutLinear(nn.Linear):
    """The outputs `rows`, or the inputs `columns`, of a Linear that is split over ranks."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        rows: range | None = None,
        columns: range | None = None,
    ) -> None:
        rows, columns = rows or range(outputs), columns or range(inputs)
        super().__init__(len(columns), len(rows), bias=bias)
        index = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        self.cuts = {"weight": Cut((outputs, inputs), index), "bias": Cut((outputs,), index[:1])}


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """Return the part to read of each tensor that this rank does not hold as a whole, by name."""
    return {
        f"{path}.{name}": child.cuts[name]
        for path, child in module.named_modules()
        if isinstance(child, CutLinear)
        for name, local in child.named_parameters()
        if tuple(local.shape) != child.cuts[name].full_shape
    }
