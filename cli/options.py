"""Click options made from a config class: the class is the only list of knobs.

`--data a.jsonl b.jsonl` takes several values at once, as a shell's glob gives them.
"""

import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from dflash_offline.config import Config, option_name

ConfigT = TypeVar("ConfigT", bound=Config)
Command = TypeVar("Command", bound=Callable[..., Any])


class LayerIds(click.ParamType[tuple[int, ...]]):
    """`1,8,14` -> (1, 8, 14)."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,8,14", param, ctx)


def _is_many(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint)[0] is Path


def _option(rule: Field[Any], hint: Any) -> Callable[[Command], Command]:
    if get_origin(hint) is types.UnionType:  # `int | None` -> int
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    has_default = rule.default is not MISSING
    settings: dict[str, Any] = {"help": rule.metadata["help"], "required": not has_default}
    if has_default:
        settings |= {"default": rule.default, "show_default": rule.default is not None}
    if hint is bool:
        settings["is_flag"] = True
    elif rule.metadata["choices"]:
        settings["type"] = click.Choice(rule.metadata["choices"])
    elif hint is Path:
        settings["type"] = click.Path(path_type=Path)
    elif _is_many(hint):
        settings |= {"type": click.Path(path_type=Path), "multiple": True, "metavar": "PATH..."}
    elif get_origin(hint) is tuple:
        settings["type"] = LayerIds()
    else:
        settings["type"] = hint
    return click.option(option_name(rule.name), rule.name, **settings)


def options_from(config: type[Config]) -> Callable[[Command], Command]:
    """A decorator that gives a command one option per knob of `config`."""
    hints = get_type_hints(config)

    def decorate(command: Command) -> Command:
        for rule in reversed(fields(config)):  # click lists the last decorator first
            command = _option(rule, hints[rule.name])(command)
        return command

    return decorate


def build(config: type[ConfigT], knobs: dict[str, Any]) -> ConfigT:
    """The config of a command line; a value out of range is a usage error (exit code 2)."""
    try:
        return config(**knobs)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


class VariadicCommand(click.Command):
    """Lets `--data a b c` stand for `--data a --data b --data c`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        many = {name for p in self.params if p.multiple for name in p.opts}
        return super().parse_args(ctx, list(_repeat_option(args, many)))


def _repeat_option(args: Sequence[str], many: set[str]) -> list[str]:
    spelled: list[str] = []
    current: str | None = None
    has_value = False
    for arg in args:
        if arg.startswith("-"):
            name, equals, _ = arg.partition("=")
            current, has_value = (name if name in many else None), bool(equals)
        elif current is not None:
            if has_value:
                spelled.append(current)
            has_value = True
        spelled.append(arg)
    return spelled
