"""Cutting pages into system calls."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.storage import page_file


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 20), st.integers(1, 5))
def test_pieces_are_the_bytes_in_order_and_within_limits(sizes, most, views_each):
    data = [bytes([i]) * size for i, size in enumerate(sizes)]
    before = page_file._PIECE_BYTES, page_file._MAX_VIEWS
    page_file._PIECE_BYTES, page_file._MAX_VIEWS = most, views_each
    try:
        cut = page_file.pieces([memoryview(part) for part in data])
    finally:
        page_file._PIECE_BYTES, page_file._MAX_VIEWS = before
    assert b"".join(bytes(view) for piece in cut for view in piece) == b"".join(data)
    for piece in cut:
        assert 0 < len(piece) <= views_each
        assert 0 < sum(len(view) for view in piece) <= most


def nothing(real):
    return real


def a_little_at_a_time(real):
    def preadv(file, views, offset):
        return real(file, [views[0][:5000]], offset)

    return preadv


@pytest.mark.parametrize("medium", [nothing, a_little_at_a_time])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("sizes", [[20_000], [70_001], [300_000, 5, 3 << 20], [64 << 10] * 40])
def test_pages_come_back_from_the_page_cache_and_from_the_disk(tmp_path, monkeypatch, medium, dropped, sizes):
    data = [os.urandom(size) for size in sizes]
    page = page_file.PageId(b"key", os.urandom(16), sum(sizes))
    path = str(tmp_path / "page")
    page_file.write_page(path, [memoryview(part) for part in data], page, parent=None)
    if dropped:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr(os, "preadv", medium(os.preadv))
    back = [bytearray(size) for size in sizes]
    found = page_file.read_page(path, [memoryview(part) for part in back], page)
    assert found.outcome is page_file.Outcome.HIT
    assert back == data
