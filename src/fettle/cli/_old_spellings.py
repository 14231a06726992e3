"""Commands and options as earlier versions spelled them: they keep working, and say how they are written now."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from fettle.cli.serve import COMMANDS as _SERVE

_COMMANDS = {
    "apply": ["check"],
    "package": ["serve", "package"],
    "slo": ["serve", "slo"],
    "load": ["serve", "load"],
    "export": ["serve", "export"],
    "import-mar": ["serve", "import-mar"],
}
_OPTIONS = {
    ("report", "--charts"): ["--output"],
    ("tune", "--allow-batch"): ["--allow", "batch-size"],
    ("plan", "--report"): ["--output"],
    ("trace", "--chart"): ["--output"],
    ("data", "--ranks"): ["--nproc"],
    ("memory", "--report"): ["--output"],
    ("serve export", "--out"): ["--output"],
    ("serve slo", "--head-room"): ["--headroom"],
    ("serve slo", "--study-name"): ["--study"],
    ("serve slo", "--seconds"): ["--duration"],
}
_BY_SUFFIX = {
    ("serve load", "--markdown"): ".md",
    ("serve load", "--csv"): ".csv",
    ("serve slo", "--csv"): ".csv",
    ("study", "--csv"): ".csv",
    ("study", "--parquet"): ".parquet",
}
"""Options that wrote to a file of any name; what has the suffix is an ``--output``, the rest goes on as it is."""
_ARGUMENT = re.compile(r"`([a-z][a-z_]*)(=(?:'[^'`]*'|\"[^\"`]*\"|[^`'\"]*))?`")


def renewed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments in today's spelling, and a line for each that has changed."""
    args, notes = list(arguments), []
    of_workers = ("--storage", "--study", "--help", "-h")
    of_a_package = args[:2] == ["export", "ray"] and not any(arg.startswith(of_workers) for arg in args)
    if args and args[0] in _COMMANDS and (args[0] != "export" or of_a_package):
        notes.append(f"'fettle {args[0]}' is now 'fettle {' '.join(_COMMANDS[args[0]])}'")
        args[:1] = _COMMANDS[args[0]]
    known = {name for commands in _SERVE.values() for name in commands}
    if args[:1] == ["serve"] and len(args) > 1 and args[1] not in known | {"-h", "--help"}:
        args.insert(1, "run")  # `fettle serve PACKAGE` is not old: it is short
    command = " ".join(args[: 2 if args[:1] == ["serve"] else 1])
    rewritten: list[str] = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        following = value if equals else args[index + 1] if index + 1 < len(args) else ""
        spelled: list[str] | None = _OPTIONS.get((command, name))
        if spelled is None and following.endswith(_BY_SUFFIX.get((command, name), "no such suffix")):
            spelled = ["--output"]
        if (command, name) == ("serve slo", "--study") and re.search(r"[/\\]|\.db$", following):
            spelled = ["--storage"]
        if spelled:
            notes.append(f"{name} is now {' '.join(spelled)}")
        rewritten += [*spelled[:-1], spelled[-1] + equals + value] if spelled else [arg]
    return rewritten, notes


_SPELLED = {"max_file_bytes": "max_file_size", "cache_bytes": "cache_memory", "token": "token_file"}
"""Arguments of the library whose option has another name."""


def as_options(text: str, known: Container[str] | None = None) -> str:
    """A message of the library in the command's words: `nproc=2` in back-quotes as --nproc 2, where that is `known` as
    an option; other names lose their quotes."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1], (match[2] or "")[1:].strip("'\"").removesuffix("True")
        spelled = _SPELLED.get(name) or re.sub("_(ms|s|bytes)$", "", name)  # an option's value has its unit
        name = f"--{spelled.replace('_', '-')}"
        return match[0].strip("`") if known is not None and name not in known else name + (f" {value}" if value else "")

    return _ARGUMENT.sub(option, text)
