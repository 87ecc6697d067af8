"""Builds the modules that a platform wheel carries: for every supported GPU, against a glibc of 2018.

Run as ``python build_modules.py OUT`` where hicache-kernels, ziglang and a CUDA 13 toolkit (``CUDA_HOME``) are
installed. With ``--machine aarch64 --libraries DIRECTORY`` it builds for another processor: it takes the compiler
``aarch64-linux-gnu-g++`` and, from the directory, the unpacked wheels of apache-tvm-ffi and nvidia-cuda-runtime.

Zig compiles the modules of the CPU with its own libc++, and links those of CUDA, which nvcc and g++ have compiled, with
a static libstdc++: either way against the symbols of glibc 2.28. Neither exports anything but the functions that
tvm-ffi looks up, so nothing in them can meet another library of the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import tvm_ffi
from tvm_ffi.libinfo import find_libtvm_ffi

from hicache_kernels.build import BuildRecord, arch_flags, include_flags, library_name, record_path
from hicache_kernels.compilers import find_compiler
from hicache_kernels.spec import CSRC, ModuleSpec, module_specs

GLIBC = "2.28"
CUDA_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HERE = Path(__file__).resolve().parent
ZIG = [sys.executable, "-m", "ziglang"]
_LINK = ("-shared", "-s", "-Wl,-z,defs", f"-Wl,--version-script={HERE / 'exports.map'}")


class Target(NamedTuple):
    """The processor that modules are built for, its C++ compiler, and the directories of libraries to link."""

    machine: str
    compiler: str
    tvm_ffi: Path
    cudart: Path

    @classmethod
    def of_this_machine(cls, cuda_home: Path) -> Target:
        """Take what is installed."""
        cudart = next(cuda_home.glob("lib*/libcudart_static.a")).parent
        return cls(platform.machine(), find_compiler("cpu").path, Path(find_libtvm_ffi()).parent, cudart)

    @classmethod
    def of_another(cls, machine: str, libraries: Path) -> Target:
        """Take the cross compiler of a machine, and libraries of its unpacked wheels."""
        compiler = shutil.which(f"{machine}-linux-gnu-g++")
        if compiler is None:
            raise FileNotFoundError(f"{machine}-linux-gnu-g++ is not on PATH; Debian has it in g++-{machine}-linux-gnu")
        cudart = next(libraries.glob("nvidia/*/lib/libcudart_static.a")).parent
        return cls(machine, compiler, libraries / "tvm_ffi" / "lib", cudart)

    @property
    def platform_tag(self) -> str:
        """Tag of the wheels that its modules go into."""
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.machine}"

    @property
    def zig(self) -> list[str]:
        """Zig's name of the processor with the glibc that modules may need."""
        return ["-target", f"{self.machine}-linux-gnu.{GLIBC}"]

    @property
    def link_tvm_ffi(self) -> list[str]:
        """Flags that link tvm-ffi."""
        return [f"-L{self.tvm_ffi}", "-ltvm_ffi"]

    @property
    def libstdcxx(self) -> Path:
        """The static library of the C++ compiler; FileNotFoundError where it has none."""
        command = [self.compiler, "-print-file-name=libstdc++.a"]
        path = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        if not path.is_absolute():
            raise FileNotFoundError(f"the C++ compiler {self.compiler} has no libstdc++.a")
        return path


def prefix_maps() -> list[str]:
    """Return flags that keep directories of this machine out of the modules' messages."""
    headers = Path(tvm_ffi.__file__).resolve().parent
    return [f"-fmacro-prefix-map={CSRC.parent}=hicache_kernels", f"-fmacro-prefix-map={headers}=tvm_ffi"]


def run(command: list[str]) -> None:
    """Run a command, with what it prints shown as it comes."""
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def build_for_cpu(spec: ModuleSpec, library: Path, target: Target) -> BuildRecord:
    """Compile and link a module of the CPU with zig."""
    command = [*ZIG, "c++", *target.zig, *spec.flags, *prefix_maps(), *include_flags(spec)]
    run([*command, *map(str, spec.source_files), *_LINK, *target.link_tvm_ffi, "-o", str(library)])
    return record(spec, library, (target.machine,), f"zig {metadata.version('ziglang')}", None)


def build_for_cuda(spec: ModuleSpec, library: Path, target: Target) -> BuildRecord:
    """Compile a module with nvcc, and link it with zig."""
    compiled = library.with_suffix(".o")
    nvcc = find_compiler("cuda")
    host = [f"-ccbin={target.compiler}", *(f"-Xcompiler={flag}" for flag in prefix_maps())]
    command = [nvcc.path, *spec.flags, *arch_flags("cuda", CUDA_ARCHS), "--threads=0", *host, *include_flags(spec)]
    run([*command, "-c", *map(str, spec.source_files), "-o", str(compiled)])
    static = [str(target.libstdcxx), str(target.cudart / "libcudart_static.a")]
    system = ["-lunwind", "-lpthread", "-ldl", "-lrt", "-lm"]
    shim = ["-O2", "-fPIC", "-fvisibility=hidden", str(HERE / "glibc_shim.c")]
    linked = [str(compiled), *shim, *static, *target.link_tvm_ffi, *system]
    run([*ZIG, "cc", *target.zig, *_LINK, *linked, "-o", str(library)])
    compiled.unlink()
    compiler = f"{nvcc.summary}; linked by zig {metadata.version('ziglang')}"
    return record(spec, library, CUDA_ARCHS, compiler, nvcc.toolkit_major)


def record(
    spec: ModuleSpec, library: Path, archs: tuple[str, ...], compiler: str, toolkit_major: int | None
) -> BuildRecord:
    """Say what a library was built from."""
    return BuildRecord(
        name=spec.name,
        device_type=spec.device_type,
        flags=spec.flags,
        source_key=spec.source_key(),
        archs=archs,
        tvm_ffi_version=tvm_ffi.__version__,
        compiler=compiler,
        toolkit_major=toolkit_major,
        bytes=library.stat().st_size,
    )


def copy_licences(out: Path, target: Target) -> None:
    """Put the licences of what is linked statically next to the modules."""
    zig = Path(metadata.distribution("ziglang").locate_file("ziglang"))
    gcc, cross = target.libstdcxx.parent.name, "" if target.machine == platform.machine() else "-*-cross"
    runtime = metadata.distribution("nvidia-cuda-runtime")
    cudart = next(Path(runtime.locate_file(file)) for file in runtime.files or () if file.name.startswith("License"))
    found = {
        "libcxx.txt": zig / "lib" / "libcxx" / "LICENSE.TXT",
        "libunwind.txt": zig / "lib" / "libunwind" / "LICENSE.TXT",
        "libstdcxx.txt": next(Path("/usr/share/doc").glob(f"libstdc++-{gcc}-dev{cross}/copyright")),
        "cudart.txt": cudart,
    }
    (out / "licenses").mkdir(exist_ok=True)
    for name, source in found.items():
        shutil.copyfile(source, out / "licenses" / name)


def main() -> None:
    """Build every module into ``OUT/<platform tag>``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--machine", default=platform.machine())
    parser.add_argument("--libraries", type=Path, help="unpacked wheels of the other machine")
    given = parser.parse_args()
    if given.machine == platform.machine():
        target = Target.of_this_machine(Path(os.environ["CUDA_HOME"]))
    elif given.libraries is None:
        parser.error(f"--machine {given.machine} needs --libraries")
    else:
        target = Target.of_another(given.machine, given.libraries)
    out: Path = given.out / target.platform_tag
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for spec in module_specs():
        library = out / library_name(spec)
        if spec.device_type == "cpu":
            built = build_for_cpu(spec, library, target)
        elif spec.device_type == "cuda":
            built = build_for_cuda(spec, library, target)
        else:
            continue  # ROCm's runtime is found at link time only where ROCm is installed: built on first use
        record_path(library).write_text(json.dumps(dataclasses.asdict(built), indent=1) + "\n")
        print(f"{library.name}: {built.bytes / 1e6:.1f} MB", flush=True)
    copy_licences(out, target)


if __name__ == "__main__":
    main()
