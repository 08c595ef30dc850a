"""The rows of one rank, on the device before they are needed.

A thread of this process asks torch's DataLoader for coded rows, in the order of a RowStream, and
sends each to the device on a stream of its own, one ahead of use. Whoever takes a row decodes it:
that may be compiled. The loader's processes read into a ring of buffers that they share with this
one, so a row costs them no new memory, whose pages take longer to come by than to fill; from
there it is copied into pinned memory. Without processes the thread reads by itself.

Row n is the same whatever reads it, wherever the feed began and over however many ranks.

The price, with rows of 107 MB (4,096 tokens at 5 x 5,120 in int8): shared memory for two rows a
process and one more (/dev/shm; docker's --shm-size), and the pinned memory and the device's of two
rows. A process takes 300 MB besides, and some seconds to start.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import resource_tracker
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dflash_offline.batch import Batch, CodedRow, RowDecoder, RowShape, read_row, row_bytes
from dflash_offline.launch import end_with_parent
from dflash_offline.metrics import bytes_text
from dflash_offline.packing import RowStream
from dflash_offline.shard_set import ShardSet
from dflash_offline.spec import DrafterSpec
from dflash_offline.world import World

_SEED_STRIDE = 1_000_000_007  # keeps the anchors of different seeds apart
_ROWS_AHEAD = 2  # of each process: the one it reads and the next


@dataclass(frozen=True)
class WantedRow:
    """A row to read, and the buffer to read it into. Readers need no plan of the epoch."""

    row: int
    documents: list[int]
    buffer: int


@dataclass(frozen=True)
class Failure:
    """What comes instead of a row. Were it raised, the DataLoader would make a text of it."""

    error: Exception


@dataclass(frozen=True, eq=False)
class RowReader(Dataset[CodedRow | Failure]):
    """Coded rows. Each process is given one when it starts."""

    shards: ShardSet
    spec: DrafterSpec
    shape: RowShape
    seed: int
    final_hidden: bool
    buffers: Tensor
    """uint8 [buffers, bytes of a row]"""

    def __getitem__(self, wanted: WantedRow) -> CodedRow | Failure:
        """The row, without the memory that it lies in: that is known to both sides."""
        try:
            row = read_row(
                self.shards,
                wanted.documents,
                spec=self.spec,
                shape=self.shape,
                seed=self.seed * _SEED_STRIDE + wanted.row,
                final_hidden=self.final_hidden,
                memory=self.buffers[wanted.buffer],
            )
            return row.in_memory(torch.empty(0, dtype=torch.uint8))
        except (ValueError, OSError) as error:
            return Failure(error)


@dataclass(frozen=True)
class RankRows:
    """Which rows a rank takes: every `ranks`-th one from `first` + `rank` on."""

    first: int
    per_step: int
    """Of all ranks."""
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[int]:
        return count(self.first + self.rank, self.ranks)

    @property
    def own_per_step(self) -> int:
        return self.per_step // self.ranks

    def step_end(self, row: int) -> int:
        """The first row after the step that `row` is in."""
        return row - (row - self.first) % self.per_step + self.per_step


@dataclass(frozen=True, eq=False)
class Sent:
    """A row on its way to the device; it is there once `arrived` has happened."""

    row: CodedRow
    epoch: float
    """How many epochs are done after the row's step."""
    arrived: torch.cuda.Event | None


class Sender:
    """Reads rows and sends them off. Once made, it belongs to one thread."""

    def __init__(
        self, reader: RowReader, rows: RankRows, *, workers: int, device: torch.device
    ) -> None:
        lengths, row_tokens = reader.shards.lengths.tolist(), reader.shape.row_tokens
        self._stream = RowStream(lengths, row_tokens, seed=reader.seed)
        self._rows, self._buffers = rows, reader.buffers
        self._free = deque(range(len(reader.buffers)))
        self._lent: deque[WantedRow] = deque()
        self._device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._wanted(),
            num_workers=workers,
            prefetch_factor=_ROWS_AHEAD if workers else None,
            multiprocessing_context="spawn" if workers else None,  # CUDA does not survive a fork
            worker_init_fn=partial(_start_reader, os.getpid()),
            generator=torch.Generator(),  # or it would draw from everyone's
        )
        self._found: Any = None

    def start(self) -> Sent:
        """Start the processes, and send the first row.

        They inherit that ctrl-C, the parent's to answer, is blocked here, and until they are
        ready SIGTERM is. They end with the thread that started them.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first one
        resource_tracker.ensure_running()  # when it starts, it ends all blocking
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self._found = iter(self._loader)
        return self.send()

    def send(self) -> Sent:
        """The next row, copied out of its buffer and on its way."""
        found, wanted = self._next(), self._lent.popleft()
        row = found.in_memory(self._buffers[wanted.buffer])
        epoch = self._stream.epoch(self._rows.step_end(wanted.row))
        if self._copying is None:
            sent = Sent(row.in_memory(row.slab.memory.clone()), epoch, None)
        else:
            with torch.cuda.stream(self._copying):
                row = row.pin_memory().to(self._device, non_blocking=True)
                sent = Sent(row, epoch, self._copying.record_event())
        self._free.append(wanted.buffer)
        return sent

    def stop(self) -> None:
        """End the processes."""
        if self._found is not None and self._loader.num_workers:
            self._found._shutdown_workers()

    def _wanted(self) -> Iterator[WantedRow]:
        for row in self._rows:
            wanted = WantedRow(row, self._stream[row], self._free.popleft())
            self._lent.append(wanted)
            yield wanted

    def _next(self) -> CodedRow:
        try:
            found: CodedRow | Failure = next(self._found)
        except RuntimeError as error:
            if not self._loader.num_workers or not any(w.exitcode for w in self._found._workers):
                raise
            raise ChildProcessError(
                f"one of {self._loader.num_workers} reader processes was killed, perhaps for want "
                "of memory; use fewer --reader-processes"
            ) from error
        if isinstance(found, Failure):
            raise found.error
        return found


def _start_reader(parent: int, _: int) -> None:
    """Let SIGTERM end a reader whose parent is gone, and otherwise only the second one.

    The first is the parent's to answer: launchers send it to all processes of a rank, and the rank
    has a step to finish.
    """

    def on_term(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGTERM, on_term)
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _make_buffers(workers: int, size: int) -> Tensor:
    """uint8 [buffers, size], shared if there are processes; the last one is for the row in hand.

    ValueError if there is not so much shared memory.
    """
    count = _ROWS_AHEAD * workers + 1
    if not workers:
        return torch.empty(count, size, dtype=torch.uint8)
    try:
        storage = torch.UntypedStorage._new_shared(count * size)  # as torch's default_collate
    except RuntimeError as error:
        raise ValueError(
            f"--reader-processes {workers} need {bytes_text(count * size)} of shared memory, and "
            f"there is less ({error}); use fewer (0 needs none) or make /dev/shm larger (docker: "
            "--shm-size)"
        ) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(count, size)


@dataclass(frozen=True, eq=False)
class StepRows:
    """This rank's rows of one step, each decoded when it is taken; all must be."""

    batches: Iterator[Batch]
    epoch: float
    """How many epochs are done after this step."""


class RowFeed:
    """The steps of one rank from row `first_row` on, for ever.

    with RowFeed(shards, spec=spec, ...) as steps:
        for step in steps:
            for batch in step.batches:
                ...

    Leaving the block ends the processes. They also end with this process, however it ends.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        spec: DrafterSpec,
        shape: RowShape,
        seed: int,
        first_row: int,
        rows_per_step: int,
        world: World,
        device: torch.device,
        workers: int,
        compiled: bool = False,
        final_hidden: bool = False,
    ) -> None:
        """`rows_per_step` counts those of all ranks. ValueError if shared memory will not do."""
        self.waited = 0.0
        """Seconds for which whoever takes rows has waited, the start included."""
        self._device = device
        self._decoder = RowDecoder(shards, device, compiled=compiled, final_hidden=final_hidden)
        self._rows = RankRows(first_row, rows_per_step, world.rank, world.size)
        self._untaken = 0  # rows of the step that was handed out
        size = row_bytes(shards, spec=spec, shape=shape, final_hidden=final_hidden)
        buffers = _make_buffers(workers, size)
        reader = RowReader(shards, spec, shape, seed, final_hidden, buffers)
        self._sender = Sender(reader, self._rows, workers=workers, device=device)
        self._thread = ThreadPoolExecutor(1, "feed")
        self._ahead: Future[Sent] = self._thread.submit(self._sender.start)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepRows:
        assert self._untaken == 0, "all rows of a step are taken before the next one"
        epoch = self._wait().epoch
        self._untaken = self._rows.own_per_step
        return StepRows(self._take_step(), epoch)

    def _take_step(self) -> Iterator[Batch]:
        while self._untaken:
            self._untaken -= 1
            yield self._take()

    def _take(self) -> Batch:
        """The next row; the one after it is sent off."""
        sent = self._wait()
        self._ahead = self._thread.submit(self._sender.send)
        if sent.arrived:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent.arrived)
            sent.row.slab.memory.record_stream(current)  # used there, though made on another
        return self._decoder.decode(sent.row)

    def _wait(self) -> Sent:
        started = time.monotonic()
        try:
            return self._ahead.result()
        finally:
            self.waited += time.monotonic() - started

    def close(self) -> None:
        """End the processes, once the row that is under way is there."""
        self._thread.submit(self._sender.stop)
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
