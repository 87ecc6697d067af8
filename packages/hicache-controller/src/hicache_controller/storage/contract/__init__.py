"""The contract of a storage backend as a pytest suite, and what its tests are made of; needs pytest.

A backend passes the contract when a class such as this one does::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def open_storage(self, tmp_path):
            return lambda fingerprint, room=None: MyStorage(tmp_path, fingerprint, capacity_bytes=room and room * 1024)
"""

import pytest

from .byte_pool import ByteGeometry, BytePool
from .faults import FaultyStorage

pytest.register_assert_rewrite(f"{__name__}.suite")  # before the import: failures then show the values

from .suite import OpenStorage, StorageContract  # noqa: E402

__all__ = ["ByteGeometry", "BytePool", "FaultyStorage", "OpenStorage", "StorageContract"]
