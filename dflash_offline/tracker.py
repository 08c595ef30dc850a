"""The numbers of a run for those who watch them elsewhere: TensorBoard or Weights & Biases.

Both are extras, imported only where they are asked for. The run's own log.jsonl has everything in
any case; a tracker that fails later on (a service that is down) does not end the run.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dflash_offline.metrics import say


class Tracker:
    """Scalars by step. `kind`: none, tensorboard or wandb.

    with Tracker("tensorboard", run_folder, config) as tracker:
        tracker.write(step, {"loss": 1.5})
    """

    def __init__(self, kind: str, run: Path, config: Mapping[str, Any]) -> None:
        """ValueError if the package is not there."""
        self._kind = kind
        self._has_failed = False
        try:
            self._writer = _open(kind, run, config)
        except ImportError as error:
            raise ValueError(
                f"--track {kind} needs a package that is not installed ({error.name}); "
                f'pip install ".[{kind}]" in the repository\'s folder'
            ) from None

    def write(self, step: int, facts: Mapping[str, Any]) -> None:
        """The numbers among the facts; what is not finite is left out."""
        numbers = {
            name: value
            for name, value in facts.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self._writer is None or self._has_failed:
            return
        try:
            self._send(step, numbers)
        except Exception as error:
            self._has_failed = True
            say(f"warning: {self._kind} failed ({' '.join(str(error).split())}); going on without")

    def _send(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._kind == "wandb":
            self._writer.log(dict(numbers), step=step)
            return
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None and not self._has_failed:
            self._writer.finish() if self._kind == "wandb" else self._writer.close()


def _open(kind: str, run: Path, config: Mapping[str, Any]) -> Any:
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(run / "tensorboard")
    if kind == "wandb":
        import wandb

        plain = {name: str(v) if isinstance(v, Path) else v for name, v in config.items()}
        return wandb.init(project="dflash-offline", name=run.name, dir=run, config=plain)
    return None
