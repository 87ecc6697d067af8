"""StorageSettings: sizes, limits and policies of backup and prefetch."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_kernels.validation import seconds, whole

from .policies import PrefetchPolicy


@dataclass(frozen=True)
class StorageSettings:
    """Sizes, limits and policies of backup and prefetch.

    Attributes
    ----------
    prefetch_policy
        See :class:`PrefetchPolicy`.
    prefetch_timeout_seconds, prefetch_timeout_seconds_per_page
        Time a prefetch has under the policy ``timeout``: the first, and the second for each of its pages.
    batch_pages
        Pages of one call to storage: what is in use until it ends, of a backup or prefetch that is given up.
    backup_queue_pages, prefetch_queue_pages
        Most pages waiting. A backup that finds no room within ``max_wait_seconds`` is dropped and counted; a prefetch
        that finds none ends with 0 pages.
    backup_retries, retry_seconds
        More attempts at a page that could not be stored; pause before the first, doubled for each one after it.
    max_wait_seconds
        Longest that one call of the scheduler's thread waits for storage, in sum; 0: it never waits. What storage has
        not answered by then is a miss, and what it has not taken is dropped where its host pages are needed.
    timeout_seconds
        Longest that calls wait whose purpose it is, where they are given no ``timeout``. Backups are waited for as long
        as another page is stored within that time.
    back_off_seconds
        Longest pause in which nothing is looked up, after a lookup that took too long. Pauses double up to that.
    """

    prefetch_policy: PrefetchPolicy | str = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout_seconds: float = 1.0
    prefetch_timeout_seconds_per_page: float = 0.01
    batch_pages: int = 64
    backup_queue_pages: int = 16384
    prefetch_queue_pages: int = 65536
    backup_retries: int = 2
    retry_seconds: float = 0.05
    max_wait_seconds: float = 0.02
    timeout_seconds: float = 30.0
    back_off_seconds: float = 5.0

    def __post_init__(self) -> None:
        PrefetchPolicy(self.prefetch_policy)
        whole("backup_retries", self.backup_retries, least=0)
        for name, value in vars(self).items():
            if name.endswith("_pages"):
                whole(name, value)
            elif "_seconds" in name:
                seconds(name, value, above=name == "timeout_seconds")
