"""Engines that hicache works with out of the box; each needs its extra, as ``hicache-controller[transformers]``."""
