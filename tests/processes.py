"""Programs that tests run in a process of their own: a command without torch, and imports in every order."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile

COMMANDS = """
import json, os, resource, sys
from importlib import import_module

if sys.argv[2] == "with torch":
    import torch
else:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
app = import_module(sys.argv[1]).app
print(flush=True)
for line in sys.stdin:
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()

request = json.loads(line)
for number, name in enumerate(request["outputs"], start=1):
    os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
os.chdir(request["directory"])
os.environ.clear()
os.environ.update(request["environment"])
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
large = set() if sys.argv[2] == "with torch" else {"matplotlib", "torch", "tvm_ffi"}
sys.argv[1:] = request["arguments"]
try:
    app()
finally:
    for name in large & sys.modules.keys():
        print("imported", name, file=sys.stderr)
"""
"""Imports a command line once, then forks for each run of it: most of a short run is the import."""

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


@functools.cache
def _commands(module: str, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMANDS, module, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n", f"{module} cannot be imported"
    return process


def _run(
    module: str, kind: str, arguments: tuple[object, ...], output: str | None = None
) -> subprocess.CompletedProcess[str]:
    process = _commands(module, kind)
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as written, tempfile.NamedTemporaryFile("r") as errors:
        request = {
            "outputs": (output or written.name, errors.name),
            "directory": os.getcwd(),
            "environment": os.environ | {"COLUMNS": "400"},
            "arguments": [*map(str, arguments)],
        }
        print(json.dumps(request), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(request["arguments"], code, written.read(), errors.read())


def run_within_a_gib(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line of a module in 1 GiB of addresses; it adds a line to stderr for each large package."""
    return _run(module, "within a GiB", arguments)


def run_with_torch(module: str, *arguments: object, output: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line of a module where torch is imported already, its standard output in a file if one is given.

    That saves the seconds of the import, and is no place to test what is imported.
    """
    return _run(module, "with torch", arguments, output)


def faults_of_import_orders(package: str) -> str:
    """Import each module of a package before everything else of it; say where its public names are then not there."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, package], capture_output=True, text=True)
    return done.stdout + done.stderr
