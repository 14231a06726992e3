"""Where packages come from, and whether they are what was published. Nothing is imported: files and metadata alone."""

from __future__ import annotations

import base64
import configparser
import contextlib
import csv
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.advisories import Advisory
from fettle.doctor.environment import Environment, Files, Package
from fettle.units import count_text

_REBUILD = (
    "python3 -m venv new  # rebuild it from clean versions, and replace every key and token this machine could read"
)
_HARMLESS = {"_virtualenv.pth": "import _virtualenv"}
"""What virtualenv writes itself, into no list of files."""
_OLD_DAYS = 365
_CODE = (".py", ".pth")
_MOST_NAMED = 3


_PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*===?\s*([A-Za-z0-9.+!_-]+)")


def locked(text: str) -> tuple[Package, ...]:
    """The distributions that a lock pins (``name==version``: requirements, constraints), whatever else a line says."""
    matches = [match for line in text.splitlines() if (match := _PINNED.match(line.strip()))]
    return tuple(Package(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]) for match in matches)


@check()
def compromised_release(here: Environment) -> Iterator[Finding]:
    """A release that is known to be compromised."""
    for advisory, package in here.compromised():
        yield _compromise(advisory, f"{package.name} {package.version}, installed in {package.folder},",
                          " To uninstall it takes back nothing that it took.", _REBUILD)  # fmt: skip


def pinned(here: Environment, lock: str) -> Iterator[Finding]:
    """The same of what a lock pins: its packages, as `locked` reads them, are those of `here`."""
    for advisory, package in here.compromised():
        finding = _compromise(advisory, f"{package.name} {package.version}, pinned by {lock},", "",
                              f"pin another release of {package.name} in {lock}; {_REBUILD}")  # fmt: skip
        yield replace(finding, check=compromised_release.name)


def _compromise(advisory: Advisory, what: str, more: str, mend: str) -> Finding:
    make = error if advisory.level == "error" else warning
    known = "is" if make is error else "may be"
    return make(f"{what} {known} compromised ({advisory.published}, {advisory.sources[0]}).",
                f"It {advisory.does}.{more}", mend)  # fmt: skip


@check()
def compromise_marker(here: Environment) -> Iterator[Finding]:
    """A file that such a release leaves, also where the release itself is gone."""
    folders = dict.fromkeys([*here.site_folders, *(package.folder.rstrip("/") for package in here.packages)])
    for advisory in here.advisories.advisory:
        for marker in advisory.markers:
            for folder in [""] if marker.path.startswith("/") else folders:
                path = os.path.join(folder, marker.path)
                if here.files.size(path) >= 0 and marker.sha256 in ("", here.files.sha256(path)):
                    yield error(f"{path} is a file of {advisory.package} {', '.join(advisory.versions)}, which "
                                f"{'are' if len(advisory.versions) > 1 else 'is'} compromised ({advisory.sources[0]}).",
                                f"That release {advisory.does}.", _REBUILD)  # fmt: skip


@check()
def unowned_pth(here: Environment) -> Iterator[Finding]:
    """Files that run code at every start of Python, and that belong to no package."""
    owned: set[str] | None = None
    for folder in here.site_folders:
        for path in here.files.matching(f"{glob.escape(folder)}/*.pth"):
            content = here.files.text(path)
            runs = [line for line in content.splitlines() if line.startswith(("import ", "import\t"))]
            if not runs or content.strip() == _HARMLESS.get(os.path.basename(path)):
                continue
            if owned is None:
                owned = {file for package in here.packages for file, _, _ in _recorded(here.files, package)}
            if os.path.normpath(path) not in owned:
                yield warning(f"{path} runs code at every start of Python, and belongs to no installed package: "
                              f"{_plain(runs[0])}", "It is how stealers of keys stay after the package is gone.",
                              f"less {path}  # and remove it if you did not put it there")  # fmt: skip


@check()
def changed_files(here: Environment) -> Iterator[Finding]:
    """Files that are not what their package installed: all by size, Python code by its hash."""
    for package in here.packages:
        rows = [row for row in _recorded(here.files, package) if row[1]]
        gone = [file for file, _, _ in rows if not here.files.exists(file)]
        if rows and len(gone) == len(rows):
            continue  # the metadata alone are left: pip takes them for an installed package, and so do we elsewhere
        changed = [row[0] for row in rows if _differs(here.files, *row)]
        faults = (
            (changed, "differ from what was installed", "They were edited by hand, or by somebody else."),
            (gone, "are missing", "A broken installation fails when the part is used."),
        )
        mend = f"pip install --force-reinstall --no-deps '{package.name}=={package.version}'"
        for files, seen, why in faults:
            if files:
                named = ", ".join(files[:_MOST_NAMED]) + (", ..." if len(files) > _MOST_NAMED else "")
                count = count_text(len(files), "file")
                yield warning(f"{count} of {package.name} {package.version} {seen}: {named}.", why, mend)


@check()
def shadowing_index(here: Environment) -> Iterator[Finding]:
    """pip or uv set up so that a public index can shadow a private name; or without a secure connection."""
    for where, name, value in _pip_settings(here):
        urls = [url for url in value.split() if re.match(r"https?://", url)]
        remote = [_plain(re.sub(r"//[^/]*@", "//***@", url)) for url in urls]
        mend = "pip config unset global." + name if "/" in where else f"unset {where}"
        if name == "extra-index-url" and remote:
            yield warning(f"{where} sets extra-index-url: {', '.join(remote[:2])}.",
                          "Of two packages with one name pip takes the higher version, from any index: that is how "
                          "torchtriton was replaced.", f"{mend}  # one --index-url that has all names")  # fmt: skip
        if name == "trusted-host" and value.strip():
            yield warning(f"{where} sets trusted-host: {_plain(value)}.", "pip does not check who answers.", mend)
        if name in ("index-url", "extra-index-url") and any(url.startswith("http://") for url in remote):
            yield warning(f"{where} sets {name} without TLS: {_plain(' '.join(remote))}.",
                          "Anybody on the way can replace a package.", mend)  # fmt: skip
    if "unsafe" in here.variables.get("UV_INDEX_STRATEGY", ""):
        yield warning(f"UV_INDEX_STRATEGY={here.variables['UV_INDEX_STRATEGY']} is set.",
                      "uv takes the best version from any index, as pip does: a public name can shadow a private one.",
                      "unset UV_INDEX_STRATEGY")  # fmt: skip


@check()
def old_advisories(here: Environment) -> Iterator[Finding]:
    """A list of compromised releases that is too old to be relied on."""
    days = (here.today - here.advisories.checked).days
    if here.advisories.advisory and days > _OLD_DAYS:
        yield note(f"The list of compromised releases is of {here.advisories.checked}, {days} days ago.",
                   "What was published since then is not known here.", "pip install --upgrade torch-fettle  # or "
                   "--advisories FILE")  # fmt: skip


def _recorded(files: Files, package: Package) -> Iterator[tuple[str, str, str]]:
    """The files that a package installed: path, hash and size as its RECORD says them."""
    text = files.text(f"{package.info}/RECORD") if package.info else ""
    with contextlib.suppress(csv.Error):  # damaged: what stands above that counts
        for row in csv.reader(text.splitlines()):
            if len(row) == 3:
                yield os.path.normpath(os.path.join(package.folder, row[0])), row[1], row[2]


def _differs(files: Files, path: str, recorded: str, size: str) -> bool:
    kind, _, digest = recorded.partition("=")
    has = files.size(path)
    if has < 0 or kind != "sha256":
        return False
    if size.isdecimal() and int(size[:18]) != has:
        return True
    if not path.endswith(_CODE):
        return False
    try:
        wanted = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except ValueError:
        return True
    return files.sha256(path) not in ("", wanted)


def _pip_settings(here: Environment) -> Iterator[tuple[str, str, str]]:
    """Where, which and what of pip's settings that say where packages come from; uv's variables among them."""
    names = ("index-url", "extra-index-url", "trusted-host")
    for name in names:
        for tool in ("PIP", "UV"):
            variable = f"{tool}_{name.upper().replace('-', '_')}"
            if here.variables.get(variable):
                yield variable, name, here.variables[variable]
    home, get = here.variables.get("HOME", ""), here.variables.get
    folders = [*(f"{folder}/pip" for folder in get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)), f"{home}/.pip",
               f"{get('XDG_CONFIG_HOME') or home + '/.config'}/pip", get("VIRTUAL_ENV", "")]  # fmt: skip
    places = ["/etc/pip.conf", *(f"{folder}/pip.conf" for folder in folders), get("PIP_CONFIG_FILE", "")]
    for path in dict.fromkeys(places):
        parser = configparser.RawConfigParser(strict=False)  # as pip has it
        with contextlib.suppress(configparser.Error):  # damaged: what could be read counts
            parser.read_string(here.files.text(path) if path else "")
        lines = [item for section in parser.values() for item in section.items()]
        settings = {key.replace("_", "-"): " ".join(value.split()) for key, value in lines}
        yield from ((path, name, settings[name]) for name in names if name in settings)


def _plain(text: str) -> str:
    """What may be printed on a terminal, and not too much of it."""
    line = re.sub(r"[^\x20-\x7e]", "?", text)
    return line if len(line) <= 100 else line[:100] + " ..."
