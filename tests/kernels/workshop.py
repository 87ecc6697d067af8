"""A copy of sources, a cache, and a compiler that writes down each of its starts; what the loader's tests share."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hicache_kernels.probe import ModuleLoader
from hicache_kernels.spec import ModuleSpec, module_specs

# Written against the C interface, whose header compiles in no time.
SOURCE = """
#include <tvm/ffi/c_api.h>
#include <shared.h>
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_add(void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = arguments[0].v_int64 + ADDED;
  return 0;
}
"""
# Counts its starts. While the gate exists it leaves half an output, says so through one pipe, and hangs on the other.
WRAPPER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *--version*) ;; *)
  if [ -e {gate} ]; then
    for last; do :; done
    echo half > "$last"
    echo started > {started}
    read line < {release}
    exit 1
  fi
esac
exec {compiler} "$@"
"""


@dataclass
class Workshop:
    """A copy of sources, a cache, and a compiler that writes down each of its starts."""

    csrc: Path
    cache: Path
    compiler: Path
    gate: Path
    started: Path
    release: Path
    log: Path

    def specs(self) -> tuple[ModuleSpec, ...]:
        return module_specs(self.csrc)

    def spec(self) -> ModuleSpec:
        return next(spec for spec in self.specs() if spec.key == "main-cpu")

    def loader(self) -> ModuleLoader:
        return ModuleLoader(self.specs(), cache=self.cache)

    def starts(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def compilations(self) -> int:
        return self.log.read_text().count("-shared") if self.log.exists() else 0

    def libraries(self) -> list[Path]:
        return sorted(self.cache.rglob("*.so"))

    def hidden(self) -> list[Path]:
        return sorted(self.cache.glob(".*"))


def add(loader: ModuleLoader, value: int) -> int:
    outcome = loader.outcome("main", "cpu")
    assert outcome.module is not None, outcome.reason
    return int(outcome.module.add(value))


def in_child(function: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process
