"""Revisions of the code under test: a git worktree for each, which is gone when it is no longer needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from fettle.errors import UsageError
from fettle.workload import Target

LOCKS = (
    "uv.lock", "poetry.lock", "pdm.lock", "pixi.lock", "Pipfile.lock", "conda-lock.yml", "environment.yml",
    "*requirements*.txt", "requirements*.lock", "constraints*.txt", "requirements/*.txt",
)  # fmt: skip
"""Files that say what an environment holds."""


@dataclass(frozen=True)
class Repository:
    """A git repository with a working tree."""

    root: Path

    def resolve(self, revision: str) -> str:
        """The commit that a revision names. Raises `UsageError` where there is no such commit."""
        if revision.startswith("-"):
            raise UsageError(f"{revision!r} is not a revision")
        resolved = self._git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False)
        if not resolved:
            shallow = self._git("rev-parse", "--is-shallow-repository", check=False) == "true"
            why = ": the clone is shallow, fetch the revision first (actions/checkout: fetch-depth: 0)"
            raise UsageError(f"there is no revision {revision!r} in {self.root}{why if shallow else ''}")
        return resolved

    def name(self, commit: str) -> str:
        """A commit's short hash and the first line of its message."""
        return self._git("log", "-1", "--format=%h %s", commit)

    def working_tree(self) -> str:
        """What the working tree is, in words."""
        head = self._git("rev-parse", "--short", "--verify", "--quiet", "HEAD", check=False)
        changed = self._git("status", "--porcelain", "--untracked-files=no")
        return f"working tree ({head or 'no commit'}{' with changes' if changed else ''})"

    def holds(self, commit: str, path: Path) -> bool:
        """Whether a file of the working tree is there at a commit."""
        place = path.relative_to(self.root).as_posix()
        return bool(self._git("ls-tree", "--name-only", commit, "--", f":(literal){place}", check=False))

    def changed_locks(self, commit: str) -> list[str]:
        """Files that say what the environment holds, and differ between a commit and the working tree."""
        return _names(self._git("diff", "--name-only", "--no-renames", "-z", commit, "--", *LOCKS))

    @staticmethod
    def locks_beside(names: Sequence[str], place: Path) -> list[str]:
        """Files of the checkout `place` that say what the environment holds, in the folders of `names` and above."""
        folders = {folder for name in names for folder in Path(name).parents}
        return [one for one in _names(_git(place, "ls-files", "-z", "--", *LOCKS)) if Path(one).parent in folders]

    def between(self, good: str, bad: str) -> list[str]:
        """The commits after `good` up to `bad`, the oldest first, along first parents."""
        if good == bad or self._git("merge-base", good, bad, check=False) != good:
            raise UsageError(f"{self.name(good)!r} is not an ancestor of {self.name(bad)!r}: nothing lies between them")
        return self._git("rev-list", "--reverse", "--first-parent", f"{good}..{bad}").splitlines()

    def add_submodules(self, commit: str, place: Path) -> list[str]:
        """Check out the submodules of a commit, and theirs, in its worktree: from the clones that are here, asking no
        network. Returns the paths of those that are not here."""
        missing, quiet = [], ("-c", "core.hooksPath=/dev/null")
        for entry in self._git("ls-tree", "-r", "-z", commit).split("\0"):
            about, _, path = entry.partition("\t")
            if not about.startswith("160000 "):
                continue
            checkout, wanted = self.root / path, about.split()[2]
            is_here = (checkout / ".git").exists()
            if not is_here or not _git(checkout, "rev-parse", "-q", "--verify", f"{wanted}^{{commit}}", check=False):
                missing.append(path)
                continue
            self._git(*quiet, "clone", "--quiet", "--shared", "--no-checkout", str(checkout), str(place / path))
            _git(place / path, *quiet, "checkout", "--quiet", "--detach", wanted)
            missing += [f"{path}/{inner}" for inner in Repository(checkout).add_submodules(wanted, place / path)]
        return missing

    @contextlib.contextmanager
    def checkout(self, commit: str, folder: Path, links: Sequence[Path] = ()) -> Iterator[Path]:
        """The files of a commit in a folder of their own below `folder`, until the block ends. `links` are paths of the
        working tree that git does not know, such as weights: they are linked into it."""
        folder.mkdir(parents=True, exist_ok=True)
        remove_orphans(self, folder)
        place = (folder / f"{os.getpid()}-{commit[:12]}").resolve()
        try:
            # no hook: what a checkout triggers on a developer's machine has no business here
            self._git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--force", "--detach", str(place), commit)
            for path in links:
                there = place / unfollowed(path).relative_to(self.root)
                if not there.exists():
                    there.parent.mkdir(parents=True, exist_ok=True)
                    there.symlink_to(path.resolve())
            yield place
        finally:
            self.remove(place)

    def remove(self, place: Path) -> None:
        """Remove a worktree, also one that was made half. Whoever made it may be gone."""
        self._git("worktree", "remove", "--force", "--force", str(place), check=False)
        shutil.rmtree(place, ignore_errors=True)
        self._git("worktree", "prune", check=False)
        with contextlib.suppress(OSError):
            place.parent.rmdir()

    def _git(self, *arguments: str, check: bool = True) -> str:
        return _git(self.root, *arguments, check=check)


def unfollowed(path: Path) -> Path:
    """Where a path lies, with links in its folder followed; not where it leads itself."""
    absolute = Path(os.path.abspath(path))
    return absolute.parent.resolve() / absolute.name


def repository_of(place: Path) -> Repository:
    """The repository that a file or folder lies in. Raises `UsageError` where it lies in none."""
    folder = place if place.is_dir() else place.parent
    try:
        return Repository(Path(_git(folder, "rev-parse", "--show-toplevel")).resolve())
    except UsageError as error:
        why = str(error).partition("fatal: ")[2] or str(error)
        raise UsageError(f"{folder} is in no git repository whose revisions could be compared ({why})") from error


def remove_orphans(repository: Repository, folder: Path) -> None:
    """Remove the worktrees of processes that were killed."""
    for place in folder.iterdir():
        number = place.name.partition("-")[0]
        if number.isdigit() and int(number) != os.getpid() and not psutil.pid_exists(int(number)):
            repository.remove(place)


def at(target: Target, repository: Repository, place: Path) -> Target:
    """The same target with the code of another revision: every place that modules come from and that lies in the
    repository is the worktree's instead, where it has that folder."""

    def there(path: str) -> str | None:
        absolute = Path(path or ".").resolve()
        if absolute != repository.root and repository.root not in absolute.parents:
            return None
        moved = place / absolute.relative_to(repository.root)
        return str(moved) if moved.exists() else None

    location, _, factory = target.reference.rpartition(":")
    if location.endswith(".py"):
        location = str(place / Path(location).relative_to(repository.root))
    search = dict.fromkeys(moved for entry in (*target.search_path, *sys.path) if (moved := there(entry)))
    kept = [entry for entry in target.search_path if there(entry) is None]
    return replace(
        target, reference=f"{location}:{factory}", search_path=(*search, *kept), folder=there(".") or "",
        instead_of=str(repository.root), checkout=str(place),
    )  # fmt: skip


def _names(listed: str) -> list[str]:
    """The files that git has listed with ``-z``: without it, those of other letters than ASCII stand in quotes."""
    return [name for name in listed.split("\0") if name]


def _git(folder: Path, *arguments: str, check: bool = True) -> str:
    # In a hook, variables such as GIT_DIR would stand above the folder that is meant here; settings hold for any.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")}  # fmt: skip
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, env={**environment, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UsageError("git is not installed, and another revision needs it") from error
    if check and done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("fatal", "error"))]
        raise UsageError(f"git {arguments[0]}: {(lines or [done.stderr.strip() or 'failed'])[0]}")
    return done.stdout.strip() if done.returncode == 0 else ""
