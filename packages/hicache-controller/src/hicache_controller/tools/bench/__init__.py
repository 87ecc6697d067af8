"""Benchmarks of the whole cache under a model: ``hicache bench``."""
