"""Tensor parallelism: which heads and which inner columns of every layer a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from omni_kvlink.models.bagel.config import LanguageConfig


def alone(x: Tensor) -> Tensor:
    """The sum over a single rank."""
    return x


@dataclass(frozen=True)
class Split:
    """One rank of those that hold a language model together.

    Attributes:
        rank, of: which of how many.
        total: the sum of all ranks' rows, the same bits on each; called in the same order by all.
    """

    rank: int = 0
    of: int = 1
    total: Callable[[Tensor], Tensor] = alone

    def check(self, config: LanguageConfig) -> None:
        """Raises ValueError unless every rank gets as much as the others."""
        kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
        if (kv_heads % self.of and self.of % kv_heads) or heads % self.of:
            raise ValueError(
                f"{heads} heads and {kv_heads} KV heads on {self.of} tensor ranks: choose a "
                "tensor_parallel_size that divides both, or a multiple of the KV heads"
            )
        if config.intermediate_size % self.of:
            raise ValueError(
                f"intermediate_size {config.intermediate_size} on {self.of} tensor ranks: choose "
                "a tensor_parallel_size that divides it"
            )

    def heads(self, config: LanguageConfig) -> range:
        """Of the queries."""
        return self._piece(config.num_attention_heads)

    def kv_heads(self, config: LanguageConfig) -> range:
        """Of K and V; where there are fewer than ranks, neighbours hold the same one."""
        return self._piece(config.num_key_value_heads)

    def inner(self, config: LanguageConfig) -> range:
        """Columns inside the MLP."""
        return self._piece(config.intermediate_size)

    def _piece(self, whole: int) -> range:
        start = self.rank * whole // self.of
        return range(start, start + max(1, whole // self.of))


WHOLE = Split()


@dataclass(frozen=True)
class Cut:
    """A piece of a checkpoint's tensor.

    Attributes:
        whole: the shape of the tensor.
        index: the piece.
    """

    whole: tuple[int, ...]
    index: tuple[slice, ...]


class CutLinear(nn.Linear):
    """Some rows, or some columns, of a Linear that several ranks hold together.

    Args:
        inputs, outputs: of the whole.
        rows: outputs that are here; all if None.
        columns: inputs that are here; all if None.
    """

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
        places = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        self.cuts = {"weight": Cut((outputs, inputs), places), "bias": Cut((outputs,), places[:1])}


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """What is to be read of each tensor that is not held as a whole, by name."""
    return {
        f"{path}.{name}": child.cuts[name]
        for path, child in module.named_modules()
        if isinstance(child, CutLinear)
        for name, held in child.named_parameters()
        if tuple(held.shape) != child.cuts[name].whole
    }
