"""Writes pages into a directory until it is killed: the other process of the crash tests.

Reads rounds as lines ``seed chains length capacity`` from stdin, forks a child for each and prints its process id; a
child prints the key of each page that is stored, a line each, and exits after ``chains`` chains. Keys say what the
bytes of their pages are.
"""

import hashlib
import os
import random
import sys

from hicache_controller.storage import FileStorage, Fingerprint
from hicache_controller.storage.contract import BytePool

FINGERPRINT = Fingerprint("org/model", "crash")
PAGE_BYTES = 256 * 1024


def content(key):
    return hashlib.shake_128(key).digest(1024) * (PAGE_BYTES // 1024)


def fake_pool():
    return BytePool(pages=16, page_size=1, page_bytes=PAGE_BYTES)


def write(directory, pool, seed, chains, length, capacity):
    storage = FileStorage(directory, fingerprint=FINGERPRINT, capacity_bytes=capacity or None, threads=2)
    storage.register_mem_pool_host(pool)
    choose = random.Random(seed)
    for _ in range(chains):
        keys, parent = [], None
        for _ in range(length):
            parent = hashlib.md5((parent or b"") + bytes([choose.randrange(4)])).digest()
            keys.append(parent)
        for page, key in enumerate(keys):
            pool.page_memory(page)[0][:] = content(key)
        stored = storage.batch_set(keys, pool.slots(range(length)), parents=[None, *keys[:-1]])
        os.write(1, b"".join(key.hex().encode() + b"\n" for key, ok in zip(keys, stored, strict=True) if ok))
    storage.close()


def main():
    directory, pool = sys.argv[1], fake_pool()
    for line in sys.stdin:
        numbers = [int(word) for word in line.split()]
        child = os.fork()
        if child == 0:
            write(directory, pool, *numbers)
            os._exit(0)
        os.write(1, f"started {child}\n".encode())
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
