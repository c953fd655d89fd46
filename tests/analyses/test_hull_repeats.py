"""The same keys give the same bytes, wherever the allocator puts things and however many threads there are."""

from __future__ import annotations

import numpy as np
import pytest

from ln_probe.analyses.geometry.api import KeyGeometry, key_geometry


def fingerprint(geometry: KeyGeometry) -> bytes:
    arrays = (
        geometry.margin_lower,
        geometry.margin_upper,
        geometry.attainable,
        geometry.attainable_upper,
        geometry.first_unselectable_at,
    )
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays) + "".join(geometry.verdict.ravel()).encode()


@pytest.mark.parametrize(("keys", "d"), [(24, 8), (40, 3), (90, 16)])
def test_bytes_do_not_depend_on_memory_or_threads(keys: int, d: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, keys, d)) * rng.lognormal(size=(4, keys, 1))
    ellipsoid = rng.normal(size=(4, d)), 3 * rng.normal(size=(4, d, d))
    seen = set()
    for trial in range(30):
        clutter = [np.full(int(n), np.nan) for n in rng.integers(1, 400, size=30)]  # holes for the allocator
        del clutter[:: 1 + trial % 3]
        geometry = key_geometry(vectors, query_set=ellipsoid, causal=True, threads=1 + trial % 3)
        seen.add(fingerprint(geometry))
    assert len(seen) == 1
