"""Batches of like length."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.inputs import bucket_by_length, padding_waste


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=200), size=st.integers(1, 9), ranks=st.integers(1, 4),
    pool=st.integers(1, 20), drop=st.booleans(), epoch=st.integers(0, 3),
)  # fmt: skip
def test_buckets_cover_every_row_once(lengths, size, ranks, pool, drop, epoch) -> None:
    seen: list[int] = []
    per_rank = []
    for rank in range(ranks):
        sampler = bucket_by_length(lengths, size, pool=pool, drop_last=drop, rank=rank, ranks=ranks, seed=3)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(sampler)  # the same epoch, the same order
        assert len(batches) == len(sampler)
        assert all(len(batch) <= size for batch in batches)
        per_rank.append(len(batches))
        seen += [row for batch in batches for row in batch]
    assert len(set(per_rank)) == 1  # ranks that run out first would hang the others
    if drop:
        assert len(seen) == len(set(seen))
    else:
        assert set(seen) == set(range(len(lengths)))


def test_bucketing_cuts_padding_and_bad_arguments_are_told() -> None:

    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(4.5, 0.8)) + 1 for _ in range(3200)]
    rows = list(range(3200))
    plain = padding_waste(lengths, [rows[i : i + 32] for i in range(0, 3200, 32)])
    assert padding_waste(lengths, list(bucket_by_length(lengths, 32))) < 0.4 * plain
    for options in ({"batch_size": 0}, {"batch_size": 2, "pool": 0}, {"batch_size": 2, "rank": 2, "ranks": 2}):
        with pytest.raises(UsageError):
            bucket_by_length([1, 2, 3], **options)
    with pytest.raises(UsageError):
        bucket_by_length([], 2)
