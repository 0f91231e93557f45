"""The share of the calibration windows that this process holds, of several processes.

All processes run the same code. Each passes its own windows through the layers; sums over
tokens are added up, rows of tokens are gathered in their order, and what is decided is what
the first process decided. torch.distributed sends, over the group that accelerate makes.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from moesaic import launch
from moesaic.errors import LostError, MoesaicError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Share:
    """This process's place among others; alone, it holds everything and sends nothing.

    The methods that send must be called by all processes, in the same order. They raise
    LostError where another process has ended. `device` is where this one computes.
    """

    place: int = 0
    processes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        return self.place == 0

    def own(self, count: int) -> slice:
        """The part of so many things, in their order; parts differ by one at most."""
        start = self.place * count // self.processes
        end = (self.place + 1) * count // self.processes
        return slice(start, end)

    def total_(self, *sums: Tensor) -> None:
        """Adds up what all processes have, in place.

        Each sends and receives about twice the bytes of the sums.
        """
        if self.processes == 1:
            return
        for tensor in sums:
            here = tensor.to(self.device)
            with _exchange():
                dist.all_reduce(here)
            if here is not tensor:
                tensor.copy_(here)

    def total(self, value: float) -> float:
        """The same of a number, in float64."""
        if self.processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        self.total_(tensor)
        return float(tensor)

    def total_of(self, partial: Tensor | float) -> Tensor:
        """The sum of what all processes have; those that have nothing give a number."""
        here = partial if isinstance(partial, Tensor) else None
        if self.processes > 1:
            kind = None if here is None else (here.shape, here.dtype)
            shape, dtype = next(filter(None, self._of_all(kind)))
            if here is None:
                here = torch.zeros(shape, dtype=dtype, device=self.device)
            self.total_(here)
        assert here is not None
        return here

    def in_turn(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The blocks of all processes, in their order, on every one of them.

        Who holds a block sends it to the others. Every process holds all blocks of its own,
        and one more.
        """
        if self.processes == 1:
            yield from blocks
            return
        own = list(blocks)
        kinds = [(block.shape, block.dtype) for block in own]
        for sender, kinds_there in enumerate(self._of_all(kinds)):
            for place, (shape, dtype) in enumerate(kinds_there):
                if sender == self.place:
                    block = own[place].to(self.device).contiguous()
                else:
                    block = torch.empty(shape, dtype=dtype, device=self.device)
                self._send(block, sender)
                yield block

    def gathered(self, blocks: Iterable[Tensor]) -> Tensor:
        """The rows of all processes, in their order."""
        return torch.cat(list(self.in_turn(blocks)))

    def agreed(self, value: Value) -> Value:
        """What the first process has. It must be small, and plain data."""
        if self.processes == 1:
            return value
        values: list[Value] = [value]
        with _exchange():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def same_(self, module: nn.Module) -> None:
        """The module gets the weights that it has on the first process.

        Tensors are put into their places: dense weights that they share memory with stay.
        """
        if self.processes == 1:
            return
        for tensor in chain(module.parameters(), module.buffers()):
            here = tensor.data
            if self.is_first:
                self._send(here.to(self.device).contiguous(), 0)
            else:
                sent = torch.empty(
                    here.shape, dtype=here.dtype, device=self.device
                )
                self._send(sent, 0)
                tensor.data = sent.to(here.device)

    def check_same(self, inputs: dict[str, object]) -> None:
        """Raises MoesaicError where processes were given different inputs."""
        of_all = self._of_all(inputs)
        for place, there in enumerate(of_all):
            for name, value in of_all[0].items():
                if there[name] != value:
                    raise MoesaicError(
                        f"process {place} has {name} = {there[name]}, the first one "
                        f"{value}; give all processes the same model, text and command"
                    )

    def _of_all(self, value: Value) -> list[Value]:
        """What each process has, in their order."""
        values: list[Value] = [value] * self.processes
        with _exchange():
            dist.all_gather_object(values, value)
        return values

    def _send(self, tensor: Tensor, sender: int) -> None:
        """From one process into the tensors of the others; it must be contiguous."""
        if not tensor.numel():
            return
        # Not every backend knows every dtype; all know bytes.
        bytes_of = tensor.view(-1).view(torch.uint8)
        with _exchange():
            dist.broadcast(bytes_of, src=sender)


ALONE = Share()


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostError(
            "another process of this run has ended, or did not answer; what it says, or "
            "its launcher, tells why"
        ) from error


def share_of_launch(device: torch.device) -> Share:
    """This process's share in a run that a launcher has started; else ALONE.

    Raises MoesaicError for a device over which processes cannot send.
    """
    if launch.processes() == 1:
        return ALONE
    if device.type not in ("cpu", "cuda"):
        raise MoesaicError(
            f"several processes exchange sums on cpu or cuda, not on {device}; pass "
            "--device cpu, or run one process"
        )
    state = PartialState(cpu=device.type == "cpu")
    # A CPU may have a number too; there is one all the same.
    elsewhere = device.type == "cuda" and state.device != device
    if elsewhere or state.device.type != device.type:
        raise MoesaicError(
            f"the processes of this run exchange sums on {state.device}, and this model "
            f"is on {device}; move it there, or run one process"
        )
    return Share(state.process_index, state.num_processes, device)


def device_of_process(device: torch.device) -> torch.device:
    """The GPU of this process's number, where a launcher has started several.

    Raises MoesaicError where there are fewer GPUs than processes, or where one GPU is
    asked for.
    """
    if launch.processes() == 1 or device.type != "cuda":
        return device
    numbered = device.index is not None
    if numbered:
        raise MoesaicError(
            f"device {device} for {launch.processes()} processes: each takes the GPU of "
            "its own number; pass --device cuda, and set CUDA_VISIBLE_DEVICES to choose"
        )
    gpus = torch.cuda.device_count()
    if launch.processes_here() > gpus:
        raise MoesaicError(
            f"{launch.processes_here()} processes on a machine of {gpus} GPUs: each takes "
            f"one of its own; start {gpus} (--nproc-per-node {gpus}), or pass --device cpu"
        )
    return torch.device("cuda", launch.place_here())


@dataclass(frozen=True)
class Rows:
    """A row for each token to fit on, block by block: this process's share of them.

    `blocks` reads them as often as it is called. `first` is the place of the first of
    them among the rows of all processes.
    """

    blocks: Callable[[], Iterable[Tensor]]
    share: Share = ALONE
    first: int = 0

    def whole(self) -> Tensor:
        """The rows of all processes (T, ...), in their order."""
        return self.share.gathered(self.blocks())


def every(
    blocks: Iterable[Tensor], stride: int, first: int = 0
) -> list[Tensor]:
    """Rows whose place is a multiple of the stride; `first` is that of the first one."""
    chosen = []
    place = first
    for block in blocks:
        chosen.append(block[-place % stride :: stride])
        place += len(block)
    return chosen
