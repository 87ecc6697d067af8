"""One of two processes that share a storage: ``prefill`` computes and stores, ``decode`` loads and checks.

Usage: ``program ROLE STORAGE WORDS...``, the storage being a directory or ``mooncake:HOST:PORT``. Prints how many pages
were found, and ends with stdin: the pages of a Mooncake store lie in the memory of its clients. The bytes of a page
follow from its key, so that either process knows what they must be.
"""

import runpy
import sys
from pathlib import Path

from hicache_controller.storage import FileStorage, Fingerprint, HiCacheStorage
from hicache_controller.storage.mooncake import MooncakeStorage

FINGERPRINT = Fingerprint("two-processes", revision="1")


def open_storage(where: str, role: str) -> HiCacheStorage:
    if not where.startswith("mooncake:"):
        return FileStorage(where, fingerprint=FINGERPRINT)
    segment_bytes = 16 << 20 if role == "prefill" else 0
    storage = MooncakeStorage(
        fingerprint=FINGERPRINT, master=where.removeprefix("mooncake:"), segment_bytes=segment_bytes
    )
    if not storage.wait_ready(30):
        raise RuntimeError("the master does not answer")
    return storage


def main() -> None:
    role, where, *words = sys.argv[1:]
    helpers = runpy.run_path(str(Path(__file__).parent / "conftest.py"))
    model = helpers["Model"](
        device_pages=16,
        host_pages=16,
        windows=(8, 8),
        states=(8, 8),
        storage=open_storage(where, role),
    )
    request = tuple(map(int, words))
    if role == "prefill":
        found = model.serve(request)
    else:
        match = model.begin(helpers["keys_of"](request))
        found = match.pages
        model.cache.release(match)
    model.cache.drain()
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    sys.stdin.read()
    model.close()


if __name__ == "__main__":
    main()
