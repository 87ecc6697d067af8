"""What a platform wheel of hicache-kernels may need of a system, and what it brings; read from the installed files.

Or from the files of a wheel for another processor, in the directory ``HICACHE_WHEEL_MODULES``, of which nothing is run.
"""

import os
import re
from pathlib import Path

import pytest

from hicache_kernels.build import WHEEL_MODULES, library_name, read_record
from hicache_kernels.probe import load_outcome
from hicache_kernels.spec import module_specs

elftools = pytest.importorskip(
    "elftools.elf.elffile", reason="pyelftools is not installed; it reads the wheel's modules"
)

OTHER = os.environ.get("HICACHE_WHEEL_MODULES")
WHEEL = Path(OTHER) if OTHER else WHEEL_MODULES
MODULES = sorted(WHEEL.glob("*.so"))
runs_modules = pytest.mark.skipif(OTHER is not None, reason="the modules are for another processor")
SYSTEM = {
    "libtvm_ffi.so",
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}

pytestmark = pytest.mark.skipif(
    not MODULES and not OTHER and not os.environ.get("HICACHE_PLATFORM_WHEEL"),
    reason="hicache-kernels is not installed from a platform wheel",
)


@pytest.fixture(params=MODULES, ids=lambda path: path.name)
def library(request: pytest.FixtureRequest) -> Path:
    return request.param


def section(library: Path, name: str) -> object:
    with library.open("rb") as file:
        found = elftools.ELFFile(file).get_section_by_name(name)
        return [*found.iter_tags()] if name == ".dynamic" else [*found.iter_symbols()]


def test_the_wheel_has_every_module_but_those_of_rocm() -> None:
    wanted = {spec: WHEEL / library_name(spec) for spec in module_specs() if spec.device_type != "rocm"}
    assert set(wanted.values()) == set(MODULES)
    for spec, library in wanted.items():
        record = read_record(library)
        assert record is not None
        assert record.source_key == spec.source_key()


def test_modules_need_no_glibc_newer_than_the_tag_says(library: Path) -> None:
    with library.open("rb") as file:
        needed = [
            auxiliary.name
            for _, versions in elftools.ELFFile(file).get_section_by_name(".gnu.version_r").iter_versions()
            for auxiliary in versions
        ]
    glibc = [tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in needed if name.startswith("GLIBC_")]
    assert glibc
    assert max(glibc) <= (2, 28)
    assert not [name for name in needed if not name.startswith("GLIBC_")]


def test_modules_link_the_c_library_and_tvm_ffi_and_search_nowhere(library: Path) -> None:
    tags = section(library, ".dynamic")
    assert {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"} <= SYSTEM
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]


def test_modules_export_only_what_tvm_ffi_looks_up(library: Path) -> None:
    exported = [symbol.name for symbol in section(library, ".dynsym") if symbol["st_shndx"] != "SHN_UNDEF"]
    assert [name for name in exported if name.startswith("__tvm_ffi_")]
    assert not [name for name in exported if name and not name.startswith("__tvm_ffi_")]


def test_modules_name_no_path_of_the_machine_that_built_them(library: Path) -> None:
    places = rb"[\w./+-]*(?:/home/|/root/|/tmp/|site-packages|dist-packages|\.nox)[\w./+-]*"
    assert not re.findall(places, library.read_bytes())


def test_cuda_modules_have_code_for_every_architecture(library: Path) -> None:
    record = read_record(library)
    assert record is not None
    if record.device_type == "cuda":
        assert record.archs == ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
        assert record.toolkit_major == 13
        assert all(arch.encode() in library.read_bytes() for arch in record.archs)


@runs_modules
@pytest.mark.parametrize(
    "spec", [spec for spec in module_specs() if spec.device_type == "cpu"], ids=lambda spec: spec.key
)
def test_cpu_modules_come_from_the_wheel(spec: object) -> None:
    outcome = load_outcome(spec.name, "cpu")
    assert (outcome.origin, outcome.reason) == ("wheel", None)


@runs_modules
@pytest.mark.parametrize("library", MODULES, indirect=True, ids=lambda path: path.name)
def test_an_exception_in_a_module_reaches_python(library: Path) -> None:
    """Thrown and caught by the C++ library that is linked into the module."""
    import tvm_ffi

    module = tvm_ffi.load_module(str(library))
    name = next(symbol.name for symbol in section(library, ".dynsym") if symbol.name.startswith("__tvm_ffi_"))
    with pytest.raises(TypeError, match="Mismatched number of arguments"):
        module[name.removeprefix("__tvm_ffi_")](*range(40))


def test_licences_of_what_is_linked_into_the_modules_are_there() -> None:
    assert {path.name for path in (WHEEL / "licenses").iterdir()} == {
        "cudart.txt",
        "libcxx.txt",
        "libstdcxx.txt",
        "libunwind.txt",
    }
