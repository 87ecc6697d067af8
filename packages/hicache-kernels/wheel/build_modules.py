"""Builds the modules that a platform wheel carries: for every supported GPU, against a glibc of 2018.

Run as ``python build_modules.py OUT`` where hicache-kernels, ziglang and a CUDA 13 toolkit (``CUDA_HOME``) are
installed. Zig compiles the modules of the CPU with its own libc++, and links those of CUDA, which nvcc and g++ have
compiled, with a static libstdc++: either way against the symbols of glibc 2.28. Neither exports anything but the
functions that tvm-ffi looks up, so nothing in them can meet another library of the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

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


def platform_tag() -> str:
    """Tag of the wheels that this machine's modules go into."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"


def target() -> str:
    """Zig's name of this machine's processor with the glibc that modules may need."""
    return f"{platform.machine()}-linux-gnu.{GLIBC}"


def prefix_maps() -> list[str]:
    """Return flags that keep directories of this machine out of the modules' messages."""
    headers = Path(tvm_ffi.__file__).resolve().parent
    return [f"-fmacro-prefix-map={CSRC.parent}=hicache_kernels", f"-fmacro-prefix-map={headers}=tvm_ffi"]


def run(command: list[str]) -> None:
    """Run a command, with what it prints shown as it comes."""
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def build_for_cpu(spec: ModuleSpec, library: Path) -> BuildRecord:
    """Compile and link a module of the CPU with zig."""
    tvm = ["-L" + str(Path(find_libtvm_ffi()).parent), "-ltvm_ffi"]
    command = [*ZIG, "c++", "-target", target(), *spec.flags, *prefix_maps(), *include_flags(spec)]
    run([*command, *map(str, spec.source_files), *_LINK, *tvm, "-o", str(library)])
    return record(spec, library, (platform.machine(),), f"zig {metadata.version('ziglang')}", None)


def build_for_cuda(spec: ModuleSpec, library: Path, home: Path) -> BuildRecord:
    """Compile a module with nvcc, and link it with zig."""
    compiled = library.with_suffix(".o")
    nvcc = find_compiler("cuda")
    maps = [f"-Xcompiler={flag}" for flag in prefix_maps()]
    command = [nvcc.path, *spec.flags, *arch_flags("cuda", CUDA_ARCHS), "--threads=0", *maps, *include_flags(spec)]
    run([*command, "-c", *map(str, spec.source_files), "-o", str(compiled)])
    static = [str(gcc_file("libstdc++.a")), str(next(home.glob("lib*/libcudart_static.a")))]
    tvm = ["-L" + str(Path(find_libtvm_ffi()).parent), "-ltvm_ffi"]
    system = ["-lunwind", "-lpthread", "-ldl", "-lrt", "-lm"]
    shim = ["-O2", "-fPIC", "-fvisibility=hidden", str(HERE / "glibc_shim.c")]
    run([*ZIG, "cc", "-target", target(), *_LINK, str(compiled), *shim, *static, *tvm, *system, "-o", str(library)])
    compiled.unlink()
    compiler = f"{nvcc.summary}; linked by zig {metadata.version('ziglang')}"
    return record(spec, library, CUDA_ARCHS, compiler, nvcc.toolkit_major)


def gcc_file(name: str) -> Path:
    """Path of a file of the C++ compiler's own library."""
    printed = subprocess.run([find_compiler("cpu").path, f"-print-file-name={name}"], capture_output=True, text=True)
    path = Path(printed.stdout.strip())
    if not path.is_absolute():
        raise FileNotFoundError(f"the C++ compiler has no {name}")
    return path


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


def copy_licences(out: Path) -> None:
    """Put the licences of what is linked statically next to the modules."""
    zig = Path(metadata.distribution("ziglang").locate_file("ziglang"))
    gcc = gcc_file("libstdc++.a").parent.name
    runtime = metadata.distribution("nvidia-cuda-runtime")
    cudart = next(Path(runtime.locate_file(file)) for file in runtime.files or () if file.name.startswith("License"))
    found = {
        "libcxx.txt": zig / "lib" / "libcxx" / "LICENSE.TXT",
        "libunwind.txt": zig / "lib" / "libunwind" / "LICENSE.TXT",
        "libstdcxx.txt": Path(f"/usr/share/doc/libstdc++-{gcc}-dev/copyright"),
        "cudart.txt": cudart,
    }
    (out / "licenses").mkdir(exist_ok=True)
    for name, source in found.items():
        shutil.copyfile(source, out / "licenses" / name)


def main() -> None:
    """Build every module into ``OUT/<platform tag>``."""
    out = Path(sys.argv[1]) / platform_tag()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    home = Path(os.environ["CUDA_HOME"])
    for spec in module_specs():
        library = out / library_name(spec)
        if spec.device_type == "cpu":
            built = build_for_cpu(spec, library)
        elif spec.device_type == "cuda":
            built = build_for_cuda(spec, library, home)
        else:
            continue  # ROCm's runtime is found at link time only where ROCm is installed: built on first use
        record_path(library).write_text(json.dumps(dataclasses.asdict(built), indent=1) + "\n")
        print(f"{library.name}: {built.bytes / 1e6:.1f} MB", flush=True)
    copy_licences(out)


if __name__ == "__main__":
    main()
