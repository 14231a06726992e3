"""Input pipelines: what a training or inference loop waits for, the loader setting that ends it, less padding.

`measure_and_search` is what `fettle data` runs; `bucket_by_length` and `padding_waste` serve the user's own loop.
"""

from __future__ import annotations

from fettle.inputs.bucket import LengthBuckets, bucket_by_length, padding_waste
from fettle.inputs.lint import Lint
from fettle.inputs.result import PipelineResult
from fettle.inputs.search import measure_and_search
from fettle.inputs.setting import Measured, Setting

__all__ = [
    "LengthBuckets", "Lint", "Measured", "PipelineResult", "Setting", "bucket_by_length", "measure_and_search",
    "padding_waste",
]  # fmt: skip
