"""The shard that an extraction has open: rows go in as they come from the device.

Every method runs in a thread behind the target's and in the order of the calls. What is not
committed when the block ends is gone.
"""

from typing import Self

from dflash_offline.dataset import Dataset
from dflash_offline.encoding import Encoded, keep_sound
from dflash_offline.meter import Meter
from dflash_offline.planning import Row
from dflash_offline.quarantine import Quarantine
from dflash_offline.shards import ShardReader, ShardWriter


class ShardStore:
    """`begin`, any number of `add`, `commit`; and again for the next shard."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        rank: int,
        largest_error: float,
        quarantine: Quarantine,
        meter: Meter,
    ) -> None:
        self._dataset, self._rank, self._largest_error = dataset, rank, largest_error
        self._quarantine, self._meter = quarantine, meter
        self._open: ShardWriter | None = None

    def begin(self, name: str) -> None:
        self._open = ShardWriter(
            self._dataset, name, rank=self._rank, largest_error=self._largest_error
        )

    def add(self, row: Row, encoded: Encoded) -> None:
        """The row's documents but for those with broken states, of which too many end the run."""
        assert self._open
        encoded.wait()
        sound = keep_sound(row, encoded.planes, encoded.facts_NL4)
        self._quarantine.add(self._open.name, sound.broken)
        if sound.row:
            self._open.append(sound.row, sound.planes, sound.facts_NL4)

    def commit(self) -> None:
        assert self._open
        self._meter.wrote(ShardReader(self._dataset, self._open.commit()).bytes)
        self._quarantine.committed()
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open.__exit__()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
