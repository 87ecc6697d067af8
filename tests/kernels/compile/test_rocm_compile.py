"""Both modules compile for AMD GPUs, into the wide streaming loads and stores that they are written for."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import needs

from hicache_kernels.build import include_flags
from hicache_kernels.spec import TRANSFER_MODULES, ModuleSpec

ARCHS = ("gfx90a", "gfx942")
STREAMING = {"gfx90a": {"glc", "slc"}, "gfx942": {"nt"}}
"""Modifiers of a non-temporal access, all of them; any one of them alone marks a half-hearted one."""
BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
"""Bytes of an access by the end of its name; anything else is narrower than 4."""
WIDTH = re.compile(r"ILi(\d+)E")
"""Vector width in the mangled name of a kernel: its first template argument."""


class Access(NamedTuple):
    """A memory instruction with a non-temporal modifier."""

    space: str
    kind: str
    bytes: int
    streaming: bool


def functions(assembly: str) -> dict[str, str]:
    """Body of each function, by mangled name."""
    return dict(re.findall(r"^(_Z\w+):(.*?)^\.Lfunc_end", assembly, re.MULTILINE | re.DOTALL))


def accesses(body: str, arch: str) -> list[Access]:
    """Non-temporal accesses of a function."""
    found = []
    for space, kind, size, operands in re.findall(r"^\s+(\w+)_(load|store)_(\w+)\s+([^;\n]*)", body, re.MULTILINE):
        modifiers = set(re.split(r"[\s,]+", operands)) & STREAMING[arch]
        if modifiers:
            found.append(Access(space, kind, BYTES.get(size, 1), modifiers == STREAMING[arch]))
    return found


def faults(assembly: str, arch: str) -> list[str]:
    """What is wrong with the streaming accesses of a module: empty where every width goes through whole vectors."""
    wrong = []
    widths = set()
    for name, body in functions(assembly).items():
        found = accesses(body, arch)
        template = WIDTH.search(name)
        if template is None:
            wrong += [f"{name}: non-temporal {a.kind} outside the kernels of a width" for a in found]
            continue
        width = int(template.group(1))
        widths.add(width)
        wrong += [f"{name}: non-temporal {a.kind} of {a.bytes} bytes" for a in found if a.bytes != width]
        wrong += [f"{name}: {a.space}_{a.kind}, not global" for a in found if a.space != "global"]
        wrong += [f"{name}: half of the modifiers" for a in found if not a.streaming]
        kinds = {a.kind for a in found if a.bytes == width}
        wrong += [f"{name}: no non-temporal {kind} of {width} bytes" for kind in ("load", "store") if kind not in kinds]
    return wrong + [f"no kernel of {width} bytes" for width in (8, 16) if width not in widths]


def assemble(spec: ModuleSpec, source: Path, arch: str) -> str:
    """Compile device code alone, to text; needs no ROCm libraries, only HIP's headers."""
    clang = shutil.which("clang++-19")
    needs(clang is not None, "no clang++-19 on PATH")
    needs(Path("/usr/include/hip/hip_runtime.h").is_file(), "no HIP headers in /usr/include")
    assert clang is not None
    command = [
        clang,
        "-x",
        "hip",
        f"--offload-arch={arch}",
        "--rocm-path=/usr",
        "-nogpulib",
        "--cuda-device-only",
        "-S",
    ]
    command += [*spec.flags, "-Wno-unused-command-line-argument", *include_flags(spec), str(source), "-o", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TRANSFER_MODULES)
def test_each_width_streams_whole_vectors(name: str, arch: str, alone: Callable[[str, str], ModuleSpec]) -> None:
    spec = alone(name, "rocm")
    assert faults(assemble(spec, spec.source_files[0], arch), arch) == []


SAMPLE = """
#include <hicache/memory.h>
template <int Bytes> __global__ void sample(uint64_t from, uint64_t to) {
  auto* source = (const uint32_t*)from + threadIdx.x * (Bytes / 4);
  auto* target = (uint32_t*)to + threadIdx.x * (Bytes / 4);
  FAULT
}
template __global__ void sample<8>(uint64_t, uint64_t);
template __global__ void sample<16>(uint64_t, uint64_t);
"""
LOAD = "hicache::Words<Bytes> w; hicache::load_nc(w, (uint64_t)source); "
WHOLE = LOAD + "hicache::store_nc((uint64_t)target, w);"
HALF = LOAD + "for (int i = 0; i < Bytes / 4; ++i) target[i] = w.value[i];"
PLAIN = "for (int i = 0; i < Bytes / 4; ++i) target[i] = source[i];"
SPLIT = PLAIN.replace("target[i] = source[i]", "__builtin_nontemporal_store(source[i], target + i)")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (WHOLE, None),
        (SPLIT, "non-temporal store of 4 bytes"),
        (PLAIN, "no non-temporal load of 16 bytes"),
        (HALF, "no non-temporal store of 8 bytes"),
    ],
    ids=["whole", "split", "plain", "half"],
)
def test_instruction_check_sees_narrow_and_plain_accesses(
    arch: str, body: str, complaint: str | None, tmp_path: Path, alone: Callable[[str, str], ModuleSpec]
) -> None:
    source = tmp_path / "sample.cu"
    source.write_text(SAMPLE.replace("FAULT", body))
    found = faults(assemble(alone("main", "rocm"), source, arch), arch)
    assert (found == []) if complaint is None else any(complaint in fault for fault in found), found


@pytest.mark.parametrize("name", TRANSFER_MODULES)
def test_whole_module_links_with_hipcc_and_exports_what_the_cpu_build_does(
    name: str, compiled: Callable[..., Path], entry_points: Callable[[Path], set[str]]
) -> None:
    exported = entry_points(compiled(name, "rocm", ("gfx90a",)))
    assert exported
    assert exported == entry_points(compiled(name, "cpu", flags=("-O0",)))
