"""A backend has to say what its pages' bytes mean: without that, pages of another format would load."""

import pytest

from hicache_controller import HiCacheStorage, MemoryStorage
from hicache_controller.storage import StorageStats


class WithoutDigest(HiCacheStorage):
    def find_pages(self, pool, keys, *, leading):
        return [False] * len(keys)

    def load_pages(self, pool, keys, pages):
        return [False] * len(keys)

    def store_pages(self, pool, keys, pages, parents):
        return [False] * len(keys)

    def clear(self):
        pass

    def stats(self):
        return StorageStats()


def test_a_backend_without_a_format_digest_cannot_be_made():
    with pytest.raises(TypeError, match="format_digest"):
        WithoutDigest()


@pytest.mark.parametrize("digest", [None, "text", bytearray(16)])
def test_a_backend_whose_format_digest_is_not_bytes_takes_no_pool(fake_pool, digest):
    class Forgets(MemoryStorage):
        def format_digest(self, pool):
            return digest

    storage = Forgets()
    with pytest.raises(TypeError, match=r"Forgets.format_digest returned .*Fingerprint.pool_digest"):
        storage.register_mem_pool_host(fake_pool())
    with pytest.raises(KeyError, match="registered pools: none"):
        storage.batch_exists([b"key"])
