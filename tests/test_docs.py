"""The documentation is what works: every Python block of README, docs and docstrings runs, each page in a folder of its
own; every shell line is parsed by the real command line."""

import ast
import contextlib
import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import fettle
from fettle.cli import COMMANDS, _old_spellings, build
from fettle.cli.serve import COMMANDS as SERVE
from fettle.doctor import CHECKS
from fettle.errors import UsageError
from fettle.report import Result
from fettle.tuning import options
from tests.conftest import quick_comparisons, quick_studies
from tests.forking import forked
from tests.tuning.test_tuning import FEW

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
NAMES = {name for commands in COMMANDS.values() for name in commands}
GROUPS = ("serve", "trace", "atlas")
SERVED = {f"serve {name}" for commands in SERVE.values() for name in commands}
BLOCK = re.compile(r"^( *)```python([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def _docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring that has a block of Python, by where it is."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        code = path.read_text()
        for node in ast.walk(ast.parse(code if "```python" in code else "")):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and "```python" in text:
                    yield f"{path.name}:{getattr(node, 'name', 'module')}", text


TEXTS = [(str(path.relative_to(ROOT)), path.read_text()) for path in PAGES] + list(_docstrings())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A study of few recipes and rounds: what a page shows is run as it is written, and takes seconds."""
    monkeypatch.delitem(CHECKS, "changed-files")  # reads every file of this environment
    with quick_studies(techniques=FEW), quick_comparisons(), forked():
        yield


@pytest.mark.parametrize(("where", "text"), TEXTS, ids=[where for where, _ in TEXTS])
def test_python_blocks_run(where: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    (tmp_path / "train.py").write_text((ROOT / "tests" / "train" / "tiny_loop.py").read_text())
    namespace = {
        "__name__": "docs",
        "fettle": fettle,
        "model": model,
        "batches": [torch.ones(8, 16), torch.zeros(8, 16)],
    }
    for indent, _, code in BLOCK.findall(text):
        plain = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        exec(compile(plain, where, "exec"), namespace)


def test_blocks_are_found_in_pages_and_docstrings() -> None:
    counts = {where: len(BLOCK.findall(text)) for where, text in TEXTS}
    assert all(counts[name] for name in ("README.md", "docs/index.md", "tune.py:tune", "__init__.py:module"))
    assert not any("no-run" in text for _, text in TEXTS)


@functools.cache
def _whole_command_line() -> typer.core.TyperGroup:
    return typer.main.get_command(build())


def _parsed(words: list[str]) -> None:
    """Parse a command line as `fettle` would, and run nothing. Raises what the parser raises."""
    renewed, said = _old_spellings.renewed(words)
    assert not said, said
    command = _whole_command_line()
    context = command.make_context("fettle", renewed)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def _lines(text: str) -> list[str]:
    return re.findall(r"^\w*\$ +((?:[A-Z_]+=\S+ )?fettle .*)$", text, re.MULTILINE)


def _words(line: str) -> list[str]:
    words = shlex.split(line.partition(" > ")[0].partition(" | ")[0], comments=True)
    return words[words.index("fettle") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_lines_are_parsed_by_the_command_line(page: Path) -> None:
    for line in _lines(page.read_text()):
        with contextlib.suppress(typer.Exit) if "--version" in line else contextlib.nullcontext():
            _parsed(_words(line))


def test_a_shell_line_that_is_wrong_is_seen() -> None:
    assert len([line for page in PAGES for line in _lines(page.read_text())]) > 30
    for line in ("fettle tune", "fettle tune model.py --no-such", "fettle tine model.py", "fettle serve package"):
        with pytest.raises(Exception, match=r"Missing|No such"):
            _parsed(_words(line))
    with pytest.raises(AssertionError):
        _parsed(_words("fettle apply recipe.toml model.py"))


@functools.cache
def _every_command() -> list[tuple[str, typer.core.TyperCommand]]:
    def walk(command, path: str):
        context = command.make_context(path, [], resilient_parsing=True)
        if not hasattr(command, "list_commands"):
            yield path, command
            return
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), f"{path} {name}")

    return list(walk(_whole_command_line(), "fettle"))


def test_the_examples_of_every_command_are_parsed() -> None:
    count = 0
    for path, command in _every_command():
        text = re.sub(r" \\\n +", " ", inspect.cleandoc(command.help))  # on one line as a shell reads it
        for line in re.findall(r"^ *((?:[A-Z_]+=\S+ )?fettle .*)$", text, re.MULTILINE):
            _parsed(_words(line))
            count += 1
        assert "fettle" in command.help, f"{path} shows no example"
        assert not re.search(r"\S\n\S", command.help), f"{path} breaks its lines, whatever the width of the terminal"
    assert count > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    known = {path.removeprefix("fettle "): command for path, command in _every_command()}
    for span in re.findall(r"`fettle ([^`]+)`", page.read_text()):
        words = [word for word in _old_spellings.renewed(span.split())[0] if word]
        if words[0].isupper() or words == ["serve"] or words[:2] == ["trace", "..."]:
            continue
        name = " ".join(words[: 3 if words[:2] == ["serve", "export"] else 2 if words[0] in GROUPS else 1])
        assert name in known or name in NAMES, span
        options = {option for param in known[name].params for option in param.opts} if name in known else set()
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}, span


def test_the_options_that_errors_of_the_library_name_exist() -> None:
    options = {option for _, command in _every_command() for param in command.params for option in param.opts}
    named = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        code = path.read_text()
        for node in ast.walk(ast.parse(code if "UsageError(" in code else "")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UsageError":
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                named |= {name for text in texts for name in re.findall(r"`([a-z][a-z_]*)(?=[`=])", str(text))}
    assert len(named) > 40
    assert {_old_spellings.as_options(f"`{name}`") for name in named} <= options | {"--first"}  # of tune in Python


def test_every_command_has_its_line() -> None:
    table = (ROOT / "docs" / "commands.md").read_text()
    listed = re.findall(r"^\| `fettle (serve [a-z-]+|[a-z-]+)", table, re.MULTILINE)
    assert set(listed) == (NAMES - {"serve"}) | SERVED


def test_whatever_a_public_signature_names_is_exported_and_documented() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    documented = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)", api, re.MULTILINE)}
    assert set(fettle.__all__) <= documented
    named: set[str] = set()
    functions = (fettle.tune, fettle.apply, fettle.bench, fettle.check, Result.apply, fettle.watch, fettle.step_timer)
    for function in (*functions, fettle.Options, fettle.Limits):
        signature = inspect.signature(function)
        text = " ".join([str(p.annotation) for p in signature.parameters.values()] + [str(signature.return_annotation)])
        named |= set(re.findall(r"\b[A-Z][A-Za-z]+\b", text))
        assert "int8_layers" not in signature.parameters
        if function in (fettle.tune, fettle.bench, fettle.check):
            assert {"model", "inputs", "call", "metric"} <= signature.parameters.keys()
    plain = {"Any", "Callable", "Path", "Sequence", "None", "Unpack", "Iterator", "Iterable", "Literal", "Mapping", "T",
             "PathLike", "TextIO", "Goal"}  # fmt: skip
    aliases = {"AnyRecipe": "RecipeFile", "OnProgress": "Event", "Keywords": "Options"}  # of what is exported
    assert {aliases.get(name, name) for name in named - plain} <= set(fettle.__all__)


def test_the_keywords_of_tune_are_the_options_and_limits() -> None:
    fields = set(fettle.Options.__dataclass_fields__) - {"limits"} | set(fettle.Limits.__dataclass_fields__)
    assert set(options.Keywords.__annotations__) == fields
    made = options.options_of(fettle.Options(budget_s=5), {"max_error": 0.5, "output": "there"})
    assert (made.limits.max_error, made.budget_s, made.output) == (0.5, 5, Path("there"))
    assert options.options_of(fettle.Options(output="here"), {}).output == Path("here")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean budget_s"):
        options.options_of(None, {"budgets": 3})  # type: ignore[typeddict-unknown-key]
