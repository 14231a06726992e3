"""Coverage-guided fuzzing of reading and analysing traces, from the same small traces as `fuzzing`.

    pip install atheris
    python -m tests.trace.fuzz_atheris [-runs=10000] [-seed=1]

Options are libFuzzer's. A case ends the run where anything but a `UsageError` is raised, where it takes longer than
`CASE_SECONDS` or where the process needs more than 2 GB; its bytes are then left in a file named `crash-...`. atheris
is not among the dependencies of the tests: its wheels lag behind Python's versions.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fettle.trace"]):
    from tests.trace import fuzzing

MAX_BYTES = 20_000


def change(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the changes keep most of the JSON, so that the analyses behind the reader are reached; half do not."""
    if random.Random(seed).random() < 0.5:
        return bytes(atheris.Mutate(data, max_size))
    return fuzzing.mutate(data, seed)[:max_size]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "t.json"
        corpus.mkdir()
        for i, text in enumerate(fuzzing.SEEDS):
            (corpus / str(i)).write_bytes(text)

        def one(data: bytes) -> None:
            path.write_bytes(data)
            fuzzing.answer_everything(path)

        limits = [f"-timeout={fuzzing.CASE_SECONDS}", "-rss_limit_mb=2000", f"-max_len={MAX_BYTES}"]
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(corpus)], one, custom_mutator=change)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
