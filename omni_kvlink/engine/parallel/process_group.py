"""The ranks that work on a request together: what they exchange, and how they part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_kvlink.engine.config import DiffusionParallelConfig, StageConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.parallel.rank_coords import RankCoords, group_ranks
from omni_kvlink.engine.parallel.rendezvous import join_meeting

_LETTER = 8 << 10
"""Bytes of a message between ranks; all are of one size."""


class ProcessGroup:
    """A rank among those of its group; every verb is called by all whom it concerns, or it waits.

    Args:
        place: this rank's.
        parallel: how the stage divides its work; undivided, there is nobody to wait for.

    Attributes:
        is_alone: this rank is its whole group.

    Raises:
        EngineDeadError: of every verb, when one of the others has gone. This rank then has left,
            too, so that nobody waits for it: the stage must be started again.
    """

    def __init__(
        self,
        place: RankCoords = RankCoords(0, 0, 0),  # noqa: B008 - frozen
        parallel: DiffusionParallelConfig = DiffusionParallelConfig(),  # noqa: B008 - frozen
    ):
        self.place, self.parallel = place, parallel
        self._ranks = list(group_ranks(place.group, parallel))
        self.is_alone = len(self._ranks) == 1
        self._has_joined = self._has_left = False
        self._all: dist.ProcessGroup | None = None
        self._guidance: dist.ProcessGroup | None = None
        self._tensor: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, rank: int, config: StageConfig, device: torch.device) -> ProcessGroup:
        """Meet all ranks of the stage (NCCL on GPUs, gloo on CPUs), then those of each group.

        Raises:
            ValueError: no place to meet.
        """
        parallel = config.parallel_config
        if parallel.world_size == 1:
            return cls()
        if not config.distributed_init_method:
            raise ValueError("several ranks need a place to meet: distributed_init_method")
        where, size = config.distributed_init_method, parallel.world_size
        how: dict[str, Any] = {"init_method": where}
        if where.startswith("tcp://"):
            how = {"store": join_meeting(where, rank, size)}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # named, it may be any
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.distributed_timeout),
            **how,
        )
        mates = cls(RankCoords.of(rank, parallel), parallel)
        mates._has_joined = True
        mates._form_groups(timedelta(seconds=config.distributed_timeout))
        return mates

    def gather(self, numbers: Sequence[int], *, patience: float | None = None) -> list[list[int]]:
        """As many numbers of each rank, in the order of the ranks.

        Args:
            patience: seconds to wait for the others, instead of `distributed_timeout`.
        """
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in self._ranks]
        with self._together():
            work = dist.all_gather(found, mine, group=self._all, async_op=True)
            assert work is not None
            if patience is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=patience))
        return [row.tolist() for row in found]

    def tell(self, letter: bytes, sender: int) -> bytes:
        """A message of one rank, at most 8188 bytes, to all; `sender` counts within the group."""
        if self.is_alone:
            return letter
        whole = len(letter).to_bytes(4, "little") + letter
        sheet = torch.tensor(list(whole.ljust(_LETTER, b"\0")), dtype=torch.uint8)
        with self._together():
            dist.broadcast(sheet, self._ranks[sender], group=self._all)
        found = bytes(sheet.tolist())
        return found[4 : 4 + int.from_bytes(found[:4], "little")]

    def flow(self, flow: Tensor, guidance: int) -> Tensor:
        """What a guidance rank computed, to the others: bit for bit.

        Args:
            flow: on that rank; on the others, a tensor of the same form to write to.
        """
        if self.parallel.cfg_parallel_size == 1:
            return flow
        flow = flow.contiguous()
        sender = guidance * self.parallel.tensor_parallel_size + self.place.tensor
        with self._together():
            bits = flow.view(torch.uint8)  # of any dtype
            dist.broadcast(bits, self._ranks[sender], group=self._guidance)
        return flow

    def total(self, share: Tensor) -> Tensor:
        """The sum of all tensor ranks' shares: the same bits on each of them."""
        if self.parallel.tensor_parallel_size == 1:
            return share
        wide = share.to(torch.float32, copy=True)  # rounded once, not once for each rank
        with self._together():
            dist.all_reduce(wide, group=self._tensor)
        return wide.to(share.dtype)

    def leave(self) -> None:
        """Whoever waits for this rank shall not: it comes no more. Again does nothing."""
        self._has_left = True
        groups = [one for one in (self._tensor, self._guidance, self._all) if one is not None]
        self._tensor = self._guidance = self._all = None
        for group in groups:
            with contextlib.suppress(RuntimeError):  # it may be broken
                dist.destroy_process_group(group)

    def close(self) -> None:
        """Part from all ranks of the stage."""
        self.leave()
        if self._has_joined:
            self._has_joined = False
            dist.destroy_process_group()

    def _form_groups(self, timeout: timedelta) -> None:
        """The same calls in the same order on every rank of the stage, whosever group it is."""
        degree = self.parallel.tensor_parallel_size
        mine = dist.get_rank()

        def form(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup | None:
            if len(ranks) == 1:
                return None
            made = dist.new_group(ranks, timeout=timeout, backend=backend)
            return made if mine in ranks else None

        for group in range(self.parallel.data_parallel_size):
            ranks = list(group_ranks(group, self.parallel))
            self._all = form(ranks, "gloo") or self._all  # for numbers and words
            for tensor in range(degree):
                self._guidance = form(ranks[tensor::degree]) or self._guidance
            for first in range(0, len(ranks), degree):
                self._tensor = form(ranks[first : first + degree]) or self._tensor

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        if self._has_left:
            raise EngineDeadError("this rank has left the others: restart the stage")
        try:
            yield
        except RuntimeError as error:
            self.leave()
            raise EngineDeadError(
                f"a rank that computes with this one is gone or late, restart the stage: {error}"
            ) from error
