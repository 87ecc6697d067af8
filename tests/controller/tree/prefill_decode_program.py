"""One of two processes that share a storage directory: ``prefill`` computes and stores, ``decode`` loads and checks.

Usage: ``program ROLE DIRECTORY WORDS...``; prints how many pages were found. The bytes of a page follow from its key,
so that either process knows what they must be.
"""

import runpy
import sys
from pathlib import Path

from hicache_controller.storage import FileStorage, Fingerprint


def main() -> None:
    role, directory, *words = sys.argv[1:]
    helpers = runpy.run_path(str(Path(__file__).parent / "conftest.py"))
    model = helpers["Model"](
        device_pages=16,
        host_pages=16,
        windows=(8, 8),
        states=(8, 8),
        storage=FileStorage(directory, fingerprint=Fingerprint("two-processes", revision="1")),
    )
    request = tuple(map(int, words))
    if role == "prefill":
        found = model.serve(request)
    else:
        match = model.begin(helpers["keys_of"](request))
        found = match.pages
        model.cache.release(match)
    model.cache.drain()
    model.close()
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
