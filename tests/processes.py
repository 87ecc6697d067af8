"""Programs that tests run in a process of their own: a command without torch, and imports in every order."""

import os
import subprocess
import sys

COMMAND = """
import resource, sys
from importlib import import_module

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
app = import_module(sys.argv.pop(1)).app
try:
    app()
finally:
    for name in {"matplotlib", "torch", "tvm_ffi"} & sys.modules.keys():
        print("imported", name, file=sys.stderr)
"""

IMPORTS = """
import importlib, os, pkgutil, sys, types
import torch, tvm_ffi

package = importlib.import_module(sys.argv[1])
modules = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for module in modules:
    if module.endswith("__main__") or ".integrations" in module:
        continue
    child = os.fork()
    if not child:
        importlib.import_module(module)
        wrong = [name for name in package.__all__ if isinstance(getattr(package, name), types.ModuleType)]
        print(module, wrong) if wrong else None
        sys.stdout.flush()
        os._exit(bool(wrong))
    if os.waitpid(child, 0)[1]:
        print(module, "first")
"""


def run_within_a_gib(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line of a module in 1 GiB of addresses; it adds a line to stderr for each large package."""
    command = [sys.executable, "-c", COMMAND, module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "400"})


def faults_of_import_orders(package: str) -> str:
    """Import each module of a package before everything else of it; say where its public names are then not there."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, package], capture_output=True, text=True)
    return done.stdout + done.stderr
