"""`ProcessGroup`: collective operations of the ranks that work on a request together."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import math
import os
import socket
import struct
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from omni_kvlink.engine.config import DiffusionParallelConfig, StageConfig
from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.parallel.rank_coords import RankCoords, group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from omni_kvlink.models.bagel.layers import IntermediateTensors

MAX_BROADCAST_NBYTES = (8 << 10) - 4
"""The most of a `broadcast_bytes`; with its length, all are of one size."""
_GROUPS = (("tensor",), ("ulysses",), ("ring",), ("ulysses", "ring"), ("pipeline",), ("guidance",))
"""The axes along which ranks communicate."""
_TILES = ("tiles",)
"""In place of axes: the ranks that divide the tiles of an image, the leader first."""
_SIOCGIFADDR = 0x8915
_open_sockets: dict[str, socket.socket] = {}
"""Listening sockets that `open_rendezvous` has opened and `join_rendezvous` has not used yet."""


class ProcessGroup:
    """One rank, connected to the other ranks of its data-parallel group.

    Every collective method must be called by all ranks that take part, and blocks until they do.
    When one of them is gone, it raises EngineDeadError, and this rank aborts its own group, so
    that the other ranks stop waiting, too: the stage must be restarted. A rank that `is_alone` in
    its group, as by default, does not communicate.
    """

    def __init__(
        self,
        coords: RankCoords = RankCoords(0, 0, 0),  # noqa: B008 - frozen
        parallel: DiffusionParallelConfig = DiffusionParallelConfig(),  # noqa: B008 - frozen
    ):
        self.coords, self.parallel = coords, parallel
        self._ranks = list(group_ranks(coords.group, parallel))
        self.is_alone = len(self._ranks) == 1
        self._joined = self._aborted = False
        self._all: dist.ProcessGroup | None = None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}  # by axes, and of `_TILES`

    @classmethod
    def join(cls, rank: int, config: StageConfig, device: torch.device) -> ProcessGroup:
        """Connect to all ranks of the stage, by NCCL on GPUs, gloo on CPUs; waits for all."""
        parallel = config.parallel_config
        if parallel.world_size == 1:
            return cls()
        url, size = config.distributed_init_method, parallel.world_size
        if not url:
            raise ValueError("several ranks need a rendezvous URL: set distributed_init_method")
        init: dict[str, Any] = {"init_method": url}
        if url.startswith("tcp://"):
            init = {"store": join_rendezvous(url, rank, size)}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would resolve the host's name
        timeout = timedelta(seconds=config.distributed_timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **init)
        group = cls(RankCoords.of(rank, parallel), parallel)
        group._joined = True
        group._make_groups(timeout)
        return group

    def all_gather(
        self, numbers: Sequence[int], *, timeout: float | None = None
    ) -> list[list[int]]:
        """Collect as many numbers from each rank of the group, in the order of the ranks.

        Waits `timeout` seconds for the others; `distributed_timeout` if None.
        """
        if self.is_alone:
            return [list(numbers)]
        sent = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(sent) for _ in self._ranks]
        with self._abort_on_error():
            work = dist.all_gather(rows, sent, group=self._all, async_op=True)
            assert work is not None
            if timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout))
        return [row.tolist() for row in rows]

    def broadcast_bytes(self, message: bytes, sender: int) -> bytes:
        """Send the message of `sender`, an index in the group, to all its ranks; returns it."""
        if self.is_alone:
            return message
        framed = len(message).to_bytes(4, "little") + message
        buffer = torch.tensor(
            list(framed.ljust(MAX_BROADCAST_NBYTES + 4, b"\0")), dtype=torch.uint8
        )
        with self._abort_on_error():
            dist.broadcast(buffer, self._ranks[sender], group=self._all)
        received = bytes(buffer.tolist())
        return received[4 : 4 + int.from_bytes(received[:4], "little")]

    def broadcast_flow(self, flow: Tensor, guidance: int) -> Tensor:
        """Send a tensor from one guidance rank to the others, whose own are overwritten."""
        if self.parallel.cfg_parallel_size == 1:
            return flow
        return self._broadcast(flow.contiguous(), "guidance", guidance)

    def all_reduce(self, share: Tensor) -> Tensor:
        """Sum a tensor over the tensor ranks; the same bits on each of them."""
        if self.parallel.tensor_parallel_size == 1:
            return share
        wide = share.to(torch.float32, copy=True)  # rounded once, not once for each rank
        with self._abort_on_error():
            dist.all_reduce(wide, group=self._groups["tensor",])
        return wide.to(share.dtype)

    # a `RowCollectives`, for sequence parallelism

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Send `pieces[i]` to Ulysses rank i; returns what each sends, of these shapes."""
        sent = torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8)
        dtype = pieces[0].dtype
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
        sent_sizes = [piece.nbytes for piece in pieces]
        with self._abort_on_error():
            dist.all_to_all_single(
                received, sent, sizes, sent_sizes, group=self._groups["ulysses",]
            )
        pairs = zip(received.split(sizes), shapes, strict=True)
        return [part.view(dtype).view(shape) for part, shape in pairs]

    def shift(self, block: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        """Start to send a block to the next rank of the ring, and to receive that before's.

        The returned call waits for it; `shape` is that of the block that it returns.
        """
        index, degree = self.coords.ring, self.parallel.ring_degree
        receiver, sender = (self._rank_at(ring=(index + offset) % degree) for offset in (1, -1))
        received, sent = block.new_empty(shape), block.contiguous()
        with self._abort_on_error():
            group = self._groups["ring",]
            calls = [
                dist.P2POp(dist.isend, sent.view(torch.uint8), receiver, group),
                dist.P2POp(dist.irecv, received.view(torch.uint8), sender, group),
            ]
            works = dist.batch_isend_irecv(calls)

        def wait() -> Tensor:
            with self._abort_on_error():
                for work in works:
                    work.wait()
            return received

        return wait

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the rows of all ranks that divide an image; rank i has `counts[i]`."""
        max_count = max(counts)  # all send as many
        padded = rows.new_zeros((max_count, *rows.shape[1:]))
        padded[: len(rows)] = rows
        blocks = [torch.empty_like(padded) for _ in counts]
        with self._abort_on_error():
            dist.all_gather(
                [block.view(torch.uint8) for block in blocks],
                padded.view(torch.uint8),
                group=self._groups["ulysses", "ring"],
            )
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    # a `PipelineCollectives`, for pipeline parallelism

    def send_tensors(self, tensors: IntermediateTensors, receiver: int) -> None:
        """Send to another pipeline rank, which calls `receive_tensors`."""
        rank = self._rank_at(pipeline=receiver)
        with self._abort_on_error():
            for tensor in tensors.tensors.values():
                dense = tensor.contiguous().view(torch.uint8)
                dist.send(dense, rank, group=self._groups["pipeline",])

    def receive_tensors(self, like: IntermediateTensors, sender: int) -> IntermediateTensors:
        """Receive tensors of the names, shapes and dtypes of `like`, which the sender sends."""
        rank = self._rank_at(pipeline=sender)
        tensors = {name: tensor.new_empty(tensor.shape) for name, tensor in like.tensors.items()}
        with self._abort_on_error():
            for tensor in tensors.values():
                dist.recv(tensor.view(torch.uint8), rank, group=self._groups["pipeline",])
        return dataclasses.replace(like, tensors=tensors)

    def broadcast_tensor(self, tensor: Tensor, sender: int) -> Tensor:
        """The sender's tensor, on all pipeline ranks; the others' is not changed."""
        is_sender = self.coords.pipeline == sender
        buffer = tensor.contiguous() if is_sender else tensor.new_empty(tensor.shape)
        return self._broadcast(buffer, "pipeline", sender)

    def gather_tiles(self, tiles: Mapping[int, Tensor]) -> None:
        """Send this rank's tiles of an image, dense, to the group's leader, by index.

        Tile i is rank i modulo `vae_patch_parallel_size`'s. The leader passes all, and those of
        other ranks are overwritten.
        """
        degree = self.parallel.vae_patch_parallel_size
        with self._abort_on_error():
            for index, tile in sorted(tiles.items()):
                if not self.coords.is_leader:
                    dist.send(tile.view(torch.uint8), self._ranks[0], group=self._groups[_TILES])
                elif index % degree:
                    rank = self._ranks[index % degree]
                    dist.recv(tile.view(torch.uint8), rank, group=self._groups[_TILES])

    def abort(self) -> None:
        """Abort the group, so that the other ranks stop waiting for this one; repeatable."""
        self._aborted = True
        groups = *self._groups.values(), self._all
        self._groups, self._all = {}, None
        for group in groups:
            if group is not None:
                with contextlib.suppress(RuntimeError):  # it may be broken
                    dist.destroy_process_group(group)

    def close(self) -> None:
        """Abort the group, and disconnect from all ranks of the stage."""
        self.abort()
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor, axis: str, sender: int) -> Tensor:
        """Overwrite a dense tensor by that of the rank with another coordinate on an axis."""
        rank = self._rank_at(**{axis: sender})
        with self._abort_on_error():
            # as bytes: backends do not support every dtype
            dist.broadcast(tensor.view(torch.uint8), rank, group=self._groups[axis,])
        return tensor

    def _rank_at(self, **coords: int) -> int:
        """The rank whose coordinates are this one's, but for these."""
        return dataclasses.replace(self.coords, **coords).rank(self.parallel)

    def _make_groups(self, timeout: timedelta) -> None:
        """Make the groups of all ranks: `dist.new_group` must be called alike on every rank."""
        parallel = self.parallel

        def make(
            ranks_of: Callable[[RankCoords], Sequence[int]], backend: str | None = None
        ) -> dist.ProcessGroup | None:
            own_group = None
            all_coords = [RankCoords.of(rank, parallel) for rank in range(parallel.world_size)]
            for ranks in dict.fromkeys(tuple(ranks_of(coords)) for coords in all_coords):
                if len(ranks) > 1:
                    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                    own_group = group if dist.get_rank() in ranks else own_group
            return own_group

        # numbers and messages are on the CPU
        self._all = make(lambda coords: group_ranks(coords.group, parallel), "gloo")
        groups = {axes: make(partial(_ranks_along, axes, parallel)) for axes in _GROUPS}
        degree = parallel.vae_patch_parallel_size
        groups[_TILES] = make(lambda coords: group_ranks(coords.group, parallel)[:degree])
        self._groups = {axes: group for axes, group in groups.items() if group is not None}

    @contextlib.contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        if self._aborted:
            raise EngineDeadError("the process group was aborted: restart the stage")
        try:
            yield
        except RuntimeError as error:
            self.abort()
            raise EngineDeadError(
                f"another rank of the process group is gone or late, restart the stage: {error}"
            ) from error


def _ranks_along(
    axes: tuple[str, ...], parallel: DiffusionParallelConfig, coords: RankCoords
) -> list[int]:
    return coords.ranks_along(*axes, parallel=parallel)


def open_rendezvous(address: str) -> str:
    """Open a port for `join_rendezvous` of rank 0, which must be in this process; returns its URL.

    Raises OSError if the address is not this machine's.
    """
    sock = socket.create_server((address, 0))
    url = f"tcp://{address}:{sock.getsockname()[1]}"
    _open_sockets[url] = sock
    return url


def join_rendezvous(url: str, rank: int, size: int) -> Any:
    """Connect to the `TCPStore` of a stage's ranks; rank 0 serves it, at this address only.

    Raises OSError if the address is not this machine's or in use, and RuntimeError if the other
    ranks do not connect in time.
    """
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError(f"{url}: must be tcp://address:port")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_to(parts.hostname))
    store = partial(TCPStore, parts.hostname, parts.port, size)
    if rank:
        return store(is_master=False)
    sock = _open_sockets.pop(url, None) or socket.create_server((parts.hostname, parts.port))
    return store(is_master=True, master_listen_fd=sock.detach())


def _interface_to(host: str) -> str:
    """Name of the network interface by which this machine reaches the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing
        address = sock.getsockname()[0]
        if ipaddress.ip_address(address).is_loopback:
            return "lo"
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise OSError(f"no interface of this machine has the address {address}, which reaches {host}")
