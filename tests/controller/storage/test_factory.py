"""Storage backends by name, by ``module:Class`` and by entry point."""

import uuid

import pytest

from hicache_controller.storage import FileStorage, HiCacheStorage, MemoryStorage, StorageBackendFactory


def test_backends_by_name_and_by_class(tmp_path, fingerprint):
    made = StorageBackendFactory.create("file", directory=tmp_path, fingerprint=fingerprint)
    assert isinstance(made, FileStorage)
    made.close()
    assert isinstance(StorageBackendFactory.create("memory", capacity_bytes=5), MemoryStorage)
    path = "hicache_controller.storage.memory:MemoryStorage"
    assert StorageBackendFactory.load(path) is MemoryStorage
    name = f"test-{uuid.uuid4()}"
    StorageBackendFactory.register(name, path)
    StorageBackendFactory.register(name, path)
    assert name in StorageBackendFactory.names()
    assert issubclass(StorageBackendFactory.load(name), HiCacheStorage)
    with pytest.raises(ValueError, match="already"):
        StorageBackendFactory.register(name, "a:B")
    with pytest.raises(ValueError, match="module:Class"):
        StorageBackendFactory.load("none such")
    with pytest.raises(ValueError, match="has no 'Nothing'"):
        StorageBackendFactory.load("hicache_controller.storage.memory:Nothing")
    with pytest.raises(TypeError, match="not a subclass"):
        StorageBackendFactory.load("collections:Counter")
    with pytest.raises(ImportError):
        StorageBackendFactory.load("no_such_module_here:X")
    for wrong in (("a:b", path), ("", path), ("x", "no colon")):
        with pytest.raises(ValueError, match="accepted is"):
            StorageBackendFactory.register(*wrong)
