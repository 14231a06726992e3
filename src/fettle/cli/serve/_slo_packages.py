"""The packages among which `fettle serve slo` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fettle.errors import UsageError
from fettle.files import check_writable

if TYPE_CHECKING:
    from fettle.package.manifest import Package
    from fettle.slo.points import Variant


def is_package(text: str) -> bool:
    """Whether it is to be a package, and not a target."""
    return Path(text).is_dir() or text.endswith(".zip")


def variants_of(texts: Sequence[str], trust: Sequence[str] = (), *, writes: bool = False) -> list[Variant]:
    """The packages of these names, to choose among: of one model. Raises `UsageError`."""
    from fettle.package.handlers.generate import Settings
    from fettle.package.handlers.text import TOKENIZER
    from fettle.package.manifest import check_trust, open_package
    from fettle.package.requires import check_here
    from fettle.slo.points import Variant

    def asked(package: Package) -> object:
        manifest = package.manifest
        if isinstance(manifest.handler, Settings):
            return manifest.handler, manifest.files.get(TOKENIZER)
        return manifest.handler, manifest.inputs, package.handler_digest

    variants: list[Variant] = []
    for text in dict.fromkeys(texts):
        package = open_package(Path(text))
        manifest = package.manifest
        if isinstance(manifest.handler, Settings) and not writes:
            raise UsageError(
                f"{text} writes texts, and --p99 is for others: fettle serve slo {text} --ttft 500ms --itl 50ms"
            )
        check_here(manifest.name, manifest.requires)
        if not writes:
            check_trust(package, trust)
        if variants and asked(package) != asked(variants[0].package):
            raise UsageError(f"{text} is asked otherwise than {texts[0]}: name packages of one model, made alike")
        variants.append(Variant(text if len(texts) > 1 else "", package))
    return variants


def check_settings(variants: Sequence[Variant]) -> None:
    """Raise `UsageError` where the best setting could not be written: before it is searched for."""
    from fettle.package.manifest import MANIFEST, SETTINGS

    try:
        check_writable(*(one.package.folder / name for one in variants for name in (SETTINGS, MANIFEST)))
    except UsageError as error:
        raise UsageError(f"{error}; to search all the same, give --no-write") from error
