"""`HiddenStates`: the last layer's rows of a context's tokens, kept while the context grows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from omni_kvlink.errors import SchemaError

Keep: TypeAlias = Literal["all", "last"]


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The rows that `lm_head` reads, after the last layer and its norm, in the model's dtype.

    `keep` is "all" for a row of each token in the cache, "last" for that of the last token alone.
    """

    keep: Keep
    rows: tuple[Tensor, ...] = ()

    def after(self, new: Tensor) -> HiddenStates:
        """Return the states with those of `new` tokens [n, hidden]; this object is not changed."""
        return replace(self, rows=(*self.rows, new) if self.keep == "all" else (new[-1:],))

    def tensor(self) -> Tensor:
        """Return [tokens, hidden], or [hidden] for "last"; SchemaError without a token."""
        if not self.rows:
            raise SchemaError("a context without tokens has no hidden states")
        return torch.cat(self.rows) if self.keep == "all" else self.rows[0][0]
