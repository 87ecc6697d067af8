"""A prefix cache for Hugging Face transformers: prompts that begin alike are computed once, also across processes.

>>> cache = HiCache.for_model(model, model_id="org/model", l2_gb=16, storage="/var/cache/hicache")
>>> with cache.session(input_ids) as past:
...     output = model.generate(input_ids, past_key_values=past, max_new_tokens=64)
"""

from ._requirements import OLDEST_TRANSFORMERS
from .cache import CacheStats, HiCache
from .errors import UnsupportedError
from .past import Hit, PastCache, StaticPastCache

__all__ = ["OLDEST_TRANSFORMERS", "CacheStats", "HiCache", "Hit", "PastCache", "StaticPastCache", "UnsupportedError"]
