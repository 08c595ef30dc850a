"""A text tower of transformers before it has weights: shapes, dtypes and buffers, but no memory.

Parameters are moved to the meta device as they are registered, so those of 50 GB cost nothing.
Buffers stay real, since rotary frequencies and the like are in no file and would have to be made
again; the price is that a class which computes with its weights while it is built is refused.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from dflash_offline.facts import failing_as, reason


def build_skeleton(
    folder: Path, *, depth: int | None, dtype: torch.dtype, trust_remote_code: bool
) -> Any:
    """The text tower of the target in `folder`, or its first `depth` layers, in eval mode.

    Dtypes are those that transformers would load: `dtype`, and float32 where the class insists.
    """
    with failing_as(f"{folder} cannot be loaded as a target"), _quiet():
        config = _config_up_to(folder, depth, trust_remote_code)
        tower = _built(config, dtype=dtype, trust_remote_code=trust_remote_code)
        _keep_float32(tower)
    return tower.eval().requires_grad_(False)


def _config_up_to(folder: Path, depth: int | None, trust_remote_code: bool) -> Any:
    """The config of a text tower of `depth` layers, or of all that it has."""
    text = AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code
    ).get_text_config()
    text.name_or_path = str(folder)  # where code of its own is looked for
    if depth is None:
        return text
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return text


def _built(config: Any, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    try:
        with _weightless():
            tower = AutoModel.from_config(
                config,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error):
            raise _needs_values(config, reason(error)) from error
        raise
    if derived := [name for name, buffer in tower.named_buffers() if buffer.is_meta]:
        raise _needs_values(config, f"buffer {derived[0]}")
    return tower


def _needs_values(config: Any, where: str) -> ValueError:
    return ValueError(
        f"the class of {config.model_type} computes with its weights while it is built, when "
        f"they are not read yet, which is not supported ({where})"
    )


def _keep_float32(tower: Any) -> None:
    """Some routers stay in float32 whatever is asked for; from_config does not heed their list."""
    kept = tower._keep_in_fp32_modules_strict or ()
    for name, weight in tower.named_parameters():
        if any(re.search(pattern, name) for pattern in kept):
            weight.data = weight.data.float()


@contextmanager
def _weightless() -> Iterator[None]:
    """Parameters of all modules that are built meanwhile end up on the meta device.

    What was allocated for them and never written to has cost no memory.
    """

    def without_values(_module: nn.Module, _name: str, weight: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)

    # The annotation in torch knows no hook that returns something; its documentation does.
    handle = register_module_parameter_registration_hook(without_values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of transformers': of kernels that are not there it would tell at length."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
