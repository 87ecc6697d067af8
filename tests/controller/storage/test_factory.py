"""Storage backends by name, by ``module:Class`` and by entry point."""

import uuid
from pathlib import Path

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


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with entry points for storage backends."""

    def install(package, **backends):
        folder = tmp_path / "installed" / f"{package}-1.0.dist-info"
        folder.mkdir(parents=True)
        Path(folder, "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {path}" for name, path in backends.items()]
        Path(folder, "entry_points.txt").write_text("\n".join(["[hicache.storage]", *lines]))
        monkeypatch.syspath_prepend(str(folder.parent))

    return install


def test_an_entry_point_of_an_installed_package_names_a_backend(installed):
    name = f"shelf-{uuid.uuid4().hex}"
    assert name not in StorageBackendFactory.names()
    installed("shelves", **{name: "hicache_controller.storage.memory:MemoryStorage"})
    assert name in StorageBackendFactory.names()
    assert isinstance(StorageBackendFactory.create(name, capacity_bytes=5), MemoryStorage)
    with pytest.raises(ValueError, match=r"which is hicache_controller.*MemoryStorage already"):
        StorageBackendFactory.register(name, "a:B")
    with pytest.raises(
        ValueError, match=f"accepted are .*{name}.*, a name of an entry point in the group hicache.stor"
    ):
        StorageBackendFactory.load("none such")


def test_an_entry_point_does_not_replace_a_backend_of_this_package(installed):
    installed("impostor", file="collections:Counter")
    assert StorageBackendFactory.load("file") is FileStorage


def test_an_entry_point_that_cannot_be_imported_says_which_module(installed):
    installed("broken", broken="no_such_module_here:Storage")
    with pytest.raises(ImportError, match="storage backend is 'broken'; module no_such_module_here cannot be imported"):
        StorageBackendFactory.load("broken")


def test_options_that_a_backend_does_not_take_are_named_with_those_it_does():
    with pytest.raises(TypeError, match=r"storage backend is .memory.: .*; its options are capacity_bytes"):
        StorageBackendFactory.create("memory", path="/x")
