"""Runs the command line: ``python -m hicache_kernels``."""

from .cli import app

app(prog_name="hicache-kernels")
