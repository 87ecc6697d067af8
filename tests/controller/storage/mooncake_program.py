"""A client of a Mooncake Store in a process of its own: the other side of the exchange tests.

Arguments: the master's address and the bytes of its segment. Reads lines ``set key key ...`` and ``get key key ...``
from stdin, keys in hex, and answers each with one line of 0 and 1; with ``get``, 1 only where every byte is as its key
says. Ends with stdin.
"""

import hashlib
import os
import sys

from hicache_controller.storage import Fingerprint
from hicache_controller.storage.contract import BytePool
from hicache_controller.storage.mooncake import MooncakeStorage

FINGERPRINT = Fingerprint("org/model", "exchange")
PAGES, PAGE_BYTES, PARTS = 16, 6 * 10_000, 6


def content(key):
    return hashlib.shake_128(key).digest(PAGE_BYTES)


def fake_pool():
    return BytePool(pages=PAGES, page_size=2, page_bytes=PAGE_BYTES, parts=PARTS)


def fill(pool, page, data):
    for view in pool.page_memory(page):
        view[:], data = data[: len(view)], data[len(view) :]


def say(line):
    os.write(1, line.encode() + b"\n")


def main():
    master, segment_bytes = sys.argv[1:]
    pool = fake_pool()
    storage = MooncakeStorage(fingerprint=FINGERPRINT, master=master, segment_bytes=int(segment_bytes))
    storage.register_mem_pool_host(pool)
    say("ready" if storage.wait_ready(10) else "down")
    for line in sys.stdin:
        command, *words = line.split()
        keys = [bytes.fromhex(word) for word in words]
        slots = pool.slots(range(len(keys)))
        if command == "set":
            for page, key in enumerate(keys):
                fill(pool, page, content(key))
            done = storage.batch_set(keys, slots, parents=[None, *keys[:-1]])
        else:
            loaded = storage.batch_get(keys, slots)
            done = [ok and pool.read(page) == content(keys[page]) for page, ok in enumerate(loaded)]
        say("".join(str(int(ok)) for ok in done))
    storage.close()


if __name__ == "__main__":
    main()
