"""Pipeline parallelism: which layers a rank holds, and the rows that it hands to the next rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class IntermediateTensors:
    """The tensors that a pipeline rank hands to the next; BAGEL's "hidden_states" are rows."""

    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class PipelineCollectives(Protocol):
    """Calls between the ranks of a `LayerSplit`."""

    def send_tensors(self, tensors: IntermediateTensors, receiver: int) -> None:
        """Send to another pipeline rank, which calls `receive_tensors`."""

    def receive_tensors(self, like: IntermediateTensors, sender: int) -> IntermediateTensors:
        """Return what the sender sends, of the names, shapes and dtypes of `like`."""

    def broadcast_tensor(self, tensor: Tensor, sender: int) -> Tensor:
        """Return the sender's tensor on all pipeline ranks; the other ranks' is overwritten."""


@dataclass(frozen=True)
class LayerSplit:
    """One rank of those that divide the decoder's layers; `collectives` is None for one rank."""

    rank: int = 0
    degree: int = 1
    collectives: PipelineCollectives | None = None

    def check(self, count: int) -> None:
        """Raise ValueError unless each rank gets a layer."""
        if self.degree > count:
            raise ValueError(
                f"{count} layers on {self.degree} pipeline ranks: choose a pipeline_parallel_size "
                f"up to {count}"
            )

    def layers(self, count: int, rank: int | None = None) -> range:
        """The layers `start_layer` to `end_layer` of a rank, or of this one, among `count`."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.degree, (rank + 1) * count // self.degree)

    def run(
        self,
        rows: Tensor,
        start: int,
        stop: int,
        count: int,
        run_own: Callable[[Tensor, int, int], Tensor],
    ) -> Tensor:
        """Run rows through the layers from `start` to `stop`, each on the rank that holds it.

        All ranks call it with rows of one shape, of which the rank of layer `start` must have the
        values. All return the rows after the last layer. `run_own` runs layers of this rank.
        """
        if self.collectives is None or start == stop:
            return run_own(rows, start, stop)
        parts = [self.layers(count, rank) for rank in range(self.degree)]
        ranks = [
            rank for rank, layers in enumerate(parts) if layers.start < stop and start < layers.stop
        ]
        if self.rank in ranks:
            if self.rank > ranks[0]:
                like = IntermediateTensors({"hidden_states": rows})
                rows = self.collectives.receive_tensors(like, self.rank - 1)["hidden_states"]
            layers = parts[self.rank]
            rows = run_own(rows, max(start, layers.start), min(stop, layers.stop))
            if self.rank < ranks[-1]:
                handed = IntermediateTensors({"hidden_states": rows})
                self.collectives.send_tensors(handed, self.rank + 1)
        return self.collectives.broadcast_tensor(rows, ranks[-1])


ALL_LAYERS = LayerSplit()
