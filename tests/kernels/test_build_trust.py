"""Compiled code is loaded only from where only this user and root can have written it."""

import logging
import os
import stat
import tempfile
from pathlib import Path

import pytest
from tests.kernels.workshop import Workshop, add

from hicache_kernels import build, calibrate, info
from hicache_kernels.aot import build_aot
from hicache_kernels.constants import H200
from hicache_kernels.probe import ModuleLoader

STRANGER = 12345
PLANTS = ["others may write", "group may write", "another user's", "another user's link"]


def plant(path: Path, how: str) -> None:
    """Make ``path`` something that another user may have written."""
    if how == "others may write":
        path.chmod(0o757 if path.is_dir() else 0o646)
    elif how == "group may write":
        path.chmod(0o770 if path.is_dir() else 0o660)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        if how == "another user's":
            os.chown(path, STRANGER, STRANGER)
        else:
            target = path.with_name("elsewhere")
            path.rename(target)
            path.symlink_to(target)
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def built(workshop: Workshop) -> Path:
    """Library of a build that is kept in the cache; loaded by a child only, as a process loads a path once."""
    add(workshop.loader(), 1)
    (library,) = workshop.libraries()
    return library


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("umask", [0, 0o777])
def test_whatever_the_umask_no_other_user_can_read_or_write_the_cache(
    workshop: Workshop, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        loader = ModuleLoader(workshop.specs(), cache=tmp_path / "home" / "user" / "cache")
        assert add(loader, 1) == 2
        calibrate.write_constants(tmp_path / "home" / "user" / "cache" / "calibration" / "a.json", H200)
    finally:
        os.umask(before)
    found = [tmp_path / "home", *(tmp_path / "home").rglob("*")]
    assert {path.suffix for path in found} >= {".so", ".json", ".lock"}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("how", PLANTS)
@pytest.mark.parametrize("what", ["cache", "entry", "library", "record"])
def test_a_build_that_another_user_may_have_written_is_not_loaded_but_made_once_elsewhere(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, what: str, how: str
) -> None:
    library = built(workshop)
    planted = {
        "cache": workshop.cache,
        "entry": library.parent,
        "library": library,
        "record": library.with_suffix(".json"),
    }[what]
    plant(planted, how)
    loaders = [workshop.loader() for _ in range(2)]
    for loader in loaders:
        assert add(loader, 1) == 2
    outcomes = [loader.outcome("main", "cpu") for loader in loaders]
    assert [outcome.origin for outcome in outcomes] == ["built", "cache"]
    for outcome in outcomes:
        assert outcome.path is not None
        assert outcome.path.is_relative_to(tempfile.gettempdir())
    (warning,) = warnings(caplog)
    assert str(planted) in warning
    assert "HICACHE_KERNELS_CACHE" in warning
    state = info.module_state(workshop.spec(), workshop.cache)
    assert state.state == "to build"
    assert str(planted) in state.note


def test_a_link_of_this_user_to_a_directory_of_this_user_is_a_cache(workshop: Workshop, tmp_path: Path) -> None:
    built(workshop)
    (tmp_path / "link").symlink_to(workshop.cache)
    loader = ModuleLoader(workshop.specs(), cache=tmp_path / "link")
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "cache"


@pytest.mark.parametrize("how", PLANTS)
def test_what_another_user_prepared_in_the_temporary_directory_is_not_used_either(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    (tmp_path / "file").touch()
    elsewhere = build.boot_directory()
    assert elsewhere is not None
    elsewhere.mkdir(0o700)
    plant(elsewhere, how)
    for _ in range(2):
        loader = ModuleLoader(workshop.specs(), cache=tmp_path / "file" / "cache")
        assert add(loader, 1) == 2
        assert loader.outcome("main", "cpu").origin == "built"
    assert list(elsewhere.iterdir()) == []
    assert [str(place) in warning for place, warning in zip([tmp_path, elsewhere], warnings(caplog), strict=True)]


def test_a_cache_that_cannot_be_written_is_replaced_by_one_that_lasts_until_the_next_boot(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file" / "cache", Path("/proc/nowhere")):
        caplog.clear()
        loaders = [ModuleLoader(workshop.specs(), cache=cache) for _ in range(3)]
        assert [add(loader, 1) for loader in loaders] == [2, 2, 2]
        (warning,) = warnings(caplog)
        assert str(cache) in warning
        assert "HICACHE_KERNELS_CACHE" in warning
    assert workshop.compilations() == 1


@pytest.mark.parametrize("how", PLANTS)
@pytest.mark.parametrize("what", ["directory", "library", "record"])
def test_a_prebuilt_module_that_another_user_may_have_written_is_not_loaded(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    how: str,
) -> None:
    (result,) = build_aot(["cpu"], tmp_path / "out", specs=[workshop.spec()])
    assert result.library is not None, result.error
    library = result.library
    planted = {"directory": library.parent, "library": library, "record": library.with_suffix(".json")}[what]
    plant(planted, how)
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(tmp_path / "out"))
    loaders = [workshop.loader() for _ in range(2)]
    assert [add(loader, 1) for loader in loaders] == [2, 2]
    assert [loader.outcome("main", "cpu").origin for loader in loaders] == ["built", "cache"]
    (warning,) = warnings(caplog)
    assert str(planted) in warning


def test_modules_inside_the_package_are_trusted_as_its_python_files_are(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = build_aot(["cpu"], tmp_path / "package" / "modules", specs=[workshop.spec()])
    assert result.library is not None, result.error
    plant(result.library.parent, "others may write")
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(result.library.parent))
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "package")
    loader = workshop.loader()
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "prebuilt"


def test_modules_built_ahead_are_loaded_whatever_the_umask_was(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        (result,) = build_aot(["cpu"], tmp_path / "out", specs=[workshop.spec()])
    finally:
        os.umask(before)
    assert result.library is not None, result.error
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(tmp_path / "out"))
    loader = workshop.loader()
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "prebuilt"


@pytest.mark.parametrize("how", PLANTS)
def test_constants_that_another_user_may_have_written_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = tmp_path / "calibration" / "device.json"
    calibrate.write_constants(path, H200)
    assert calibrate.read_constants(path) == H200
    plant(path, how)
    assert [calibrate.read_constants(path) for _ in range(2)] == [None, None]
    (warning,) = warnings(caplog)
    assert str(path) in warning


@pytest.mark.parametrize("how", PLANTS[2:])
def test_a_lock_of_another_user_is_not_taken(tmp_path: Path, how: str) -> None:
    path = tmp_path / "locks" / "a.lock"
    with build.build_lock(path):
        pass
    plant(path, how)
    with pytest.raises(OSError, match=r"a\.lock"), build.build_lock(path):
        pass
