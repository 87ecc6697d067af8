"""Where a buffer is cut for registration, against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_pools.gpu_runtime import GpuRuntime
from hicache_pools.registration import Segment, registration_boundaries

segments_of = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40)).map(lambda t: Segment(t[0] * t[1], t[1])), min_size=1, max_size=4
)


def allowed_cuts(segments: list[Segment], alignment: int) -> list[int]:
    cuts, start = set(), 0
    for nbytes, page_bytes in segments:
        cuts.update(range(start, start + nbytes + 1, page_bytes))
        start += nbytes
    return sorted(cut for cut in cuts if cut % alignment == 0)


def greedy(segments: list[Segment], chunk_bytes: int, alignment: int) -> tuple[int, ...] | None:
    total, start, result = sum(s.nbytes for s in segments), 0, []
    while total - start > chunk_bytes:
        inside = [cut for cut in allowed_cuts(segments, alignment) if start < cut <= start + chunk_bytes]
        if not inside:
            return None
        start = inside[-1]
        result.append(start)
    return tuple(result)


@given(segments_of, st.integers(1, 400), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_cuts_are_those_of_brute_force(segments: list[Segment], chunk_bytes: int, alignment: int) -> None:
    expected = greedy(segments, chunk_bytes, alignment)
    if expected is None:
        with pytest.raises(ValueError, match="chunk_bytes"):
            registration_boundaries(segments, chunk_bytes=chunk_bytes, alignment=alignment)
    else:
        assert registration_boundaries(segments, chunk_bytes=chunk_bytes, alignment=alignment) == expected


def test_a_pool_of_many_registrations_is_cut_without_walking_its_pages() -> None:
    page_bytes = 3 << 20
    nbytes = page_bytes << 20  # 3 TiB
    cuts = registration_boundaries([Segment(nbytes, page_bytes)], chunk_bytes=64 << 30, alignment=4096)
    assert all(cut % page_bytes == 0 and cut % 4096 == 0 for cut in cuts)
    assert len(cuts) == nbytes // (64 << 30)


def test_a_buffer_within_one_chunk_is_not_cut() -> None:
    assert registration_boundaries([Segment(4097, 4097)], chunk_bytes=4097, alignment=4096) == ()


def test_the_runtime_of_this_process_is_found_and_its_errors_have_names() -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        pytest.skip("this torch has no GPU runtime")
    runtime = GpuRuntime()
    assert "MemoryAllocation" in runtime.describe(2) or "OutOfMemory" in runtime.describe(2)
    runtime.clear_error()
