"""A group whose commands are imported when they are called: its help needs their names and a line on each."""

from __future__ import annotations

import importlib
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""What every application of Typer here is made with."""
_CALL = re.compile(r" *(?:\w+=\S+ )?fettle ")


def _reflowed(command: Any) -> Any:
    """The command, each paragraph of its help on one line: rich keeps the breaks of the source, whatever the terminal's
    width. The last paragraph, where it begins with a call of fettle, is examples, a line each: they stand apart under
    a title; those that follow the first line at once would lose their indentation to Typer, but for an empty paragraph
    between."""
    *text, last = (command.help or "").split("\n\n")
    examples = [f"  {line.strip()}" for line in last.splitlines()] if _CALL.match(last) else []
    parts = [re.sub(r"(?<=\S)\n(?=\S)", " ", part) for part in (text if examples else [*text, last])]
    if examples:
        between = [""] * (len(text) == 1)
        parts += [*between, f"[bold]Example{'s' * (len(examples) > 1)}[/]", *map(_folded, examples)]
    command.help = "\n\n".join(parts)
    for inner in getattr(command, "commands", {}).values():
        _reflowed(inner)
    return command


def _folded(example: str) -> str:
    """An example that is too long for the terminal as a shell takes it on several lines."""
    width = max(1, shutil.get_terminal_size().columns - 4)  # the margins of the help, and the backslash
    lines = textwrap.wrap(example, width, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


class LazyGroup(TyperGroup):
    """Commands by panel of the help. A command's module has a function `command`, or a `typer.Typer` named `app`."""

    package: ClassVar[str]
    """Where the modules are."""
    commands_of: ClassVar[Mapping[str, Mapping[str, str]]]
    """Panel, name (that of the module, with dashes) and one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=line, rich_help_panel=panel)
            for panel, commands in self.commands_of.items()
            for name, line in commands.items()
        }
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself; in the help of the group only its name and line."""
        if self._listing or cmd_name not in self.commands:
            return self.commands.get(cmd_name)
        module = importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}")
        around = typer.Typer(add_completion=False, **SETTINGS)
        around.callback()(lambda: None)
        if hasattr(module, "app"):
            around.add_typer(module.app, name=cmd_name)
        else:
            around.command(cmd_name)(module.command)
        return _reflowed(typer.main.get_group(around).commands[cmd_name])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of the group."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False
