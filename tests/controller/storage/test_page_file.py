"""Cutting pages into system calls."""

from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.storage import page_file


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 20), st.integers(1, 20), st.integers(1, 5))
def test_pieces_are_the_bytes_in_order_and_within_limits(sizes, first, most, views_each):
    data = [bytes([i]) * size for i, size in enumerate(sizes)]
    before = page_file._PIECE_BYTES, page_file._MOST_VIEWS
    page_file._PIECE_BYTES, page_file._MOST_VIEWS = most, views_each
    try:
        cut = page_file.pieces([memoryview(part) for part in data], first)
    finally:
        page_file._PIECE_BYTES, page_file._MOST_VIEWS = before
    assert b"".join(bytes(view) for piece in cut for view in piece) == b"".join(data)
    for i, piece in enumerate(cut):
        assert 0 < len(piece) <= views_each
        assert 0 < sum(len(view) for view in piece) <= (most if i else first)
