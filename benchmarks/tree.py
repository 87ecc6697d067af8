"""Cost of the prefix tree: a long prompt, a request against the size of the tree, and memory; bookkeeping alone.

Writes results/tree.json and results/tree.png. Run with two cores to itself: python benchmarks/tree.py
With the path of a conversation trace as argument, the whole trace is replayed as well, a page a block.
"""

import gc
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hicache_controller.hashing import page_hashes
from hicache_controller.hybrid import HybridCacheController
from hicache_controller.tools.replay import Replay, ReplayOptions
from hicache_controller.tools.trace import TraceRequest, make_trace, read_trace
from hicache_controller.tree import UnifiedRadixCache, WindowComponent
from hicache_pools import ExtentAllocator, HostPoolGroup, NullPoolHost, PoolEntry

RESULTS = Path(__file__).parent / "results"
PAGE_TOKENS = 64
PROMPT_TOKENS = 32_768
REQUEST_PAGES = 128
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
REQUESTS = 400
LIMIT_MILLISECONDS = 2.0
LIMIT_BYTES = 200.0
LIMIT_REQUESTS = 1000.0


def make_tree(pages: int, slots: int = 1, *, states: bool = False) -> UnifiedRadixCache:
    """A tree over a device and a host pool of so many pages, without bytes; on request with a pool of states."""
    allocators = {"kv": ExtentAllocator(pages, slots)} | ({"mamba": ExtentAllocator(pages, 1)} if states else {})
    entries = [
        PoolEntry(
            name,
            NullPoolHost(pages, slots if name == "kv" else 1),
            None,
            lambda layer: layer,
            device_alloc_fn=allocator.alloc,
            device_free_fn=allocator.free,
        )
        for name, allocator in allocators.items()
    ]
    controller = HybridCacheController(HostPoolGroup(entries), synchronous=True)
    components = [WindowComponent.recurrent_state()] if states else []
    return UnifiedRadixCache(controller, allocators["kv"], page_size=slots, components=components)


def serve(tree: UnifiedRadixCache, keys: list[bytes]) -> tuple[float, float]:
    """Serve one request; returns the milliseconds of the match, and of allocation and insert."""
    begin = time.perf_counter()
    match = tree.load_back(tree.match_prefix(keys))
    middle = time.perf_counter()
    pages = tree.alloc_device(len(keys) - match.pages)
    assert pages is not None
    windows = {name: tree.alloc_window(name, 1) for name in tree.windows} if len(pages) else None
    result = tree.insert(match, pages, windows=windows)
    tree.release(result.match)
    tree.poll()
    end = time.perf_counter()
    return (middle - begin) * 1e3, (end - middle) * 1e3


def long_prompt() -> dict[str, float]:
    """Match and insert of a prompt of which the first half is cached, slots of 64 tokens and all."""
    tree, times = make_tree(8 * PROMPT_TOKENS // PAGE_TOKENS, PAGE_TOKENS), []
    for _ in range(200):
        keys = page_hashes(np.random.default_rng().integers(0, 2**31, PROMPT_TOKENS), PAGE_TOKENS)
        serve(tree, keys[: len(keys) // 2])
        pages = tree.alloc_device(len(keys) // 2)
        assert pages is not None
        begin = time.perf_counter()
        result = tree.insert(tree.match_prefix(keys), pages)
        times.append((time.perf_counter() - begin) * 1e3)
        tree.release(result.match)
        tree.poll()
    times.sort()
    return {"median_ms": statistics.median(times), "p99_ms": times[len(times) * 99 // 100]}


def conversation(shared: list[list[bytes]]) -> list[bytes]:
    """Keys of a request that shares half its pages with an earlier one."""
    random = np.random.default_rng()
    half = REQUEST_PAGES // 2
    head = shared[int(random.integers(len(shared)))]
    tail = random.bytes(16 * half)
    return head + [tail[i : i + 16] for i in range(0, len(tail), 16)]


def heads(count: int) -> list[list[bytes]]:
    """Prefixes that requests share."""
    blobs = [np.random.default_rng().bytes(8 * REQUEST_PAGES) for _ in range(count)]
    return [[blob[i : i + 16] for i in range(0, len(blob), 16)] for blob in blobs]


def against_size(tokens: int) -> dict[str, float]:
    """Times of a request once the tree is full, so that each evicts what it needs."""
    pages = tokens // PAGE_TOKENS
    tree = make_tree(pages)
    shared = heads(max(1, pages // REQUEST_PAGES // 8))
    while tree.device_allocator.available_pages >= REQUEST_PAGES:
        serve(tree, conversation(shared))
    samples = [serve(tree, conversation(shared)) for _ in range(REQUESTS)]
    return {
        "tokens": tokens,
        "nodes": tree.stats().nodes,
        "match_ms": statistics.median(match for match, _ in samples),
        "insert_ms": statistics.median(insert for _, insert in samples),
    }


def memory(requests: list[TraceRequest], pages_a_block: int, *, states: bool = False) -> dict[str, float]:
    """Bytes a page on device and host, of all that was allocated while chats filled the tree, allocators included.

    With ``states``, each request also keeps a recurrent state at its end; that is a page of its pool and counts as one.
    """
    size = pages_a_block * PAGE_TOKENS
    keys = [page_hashes(np.repeat(np.array(request.blocks), size), PAGE_TOKENS) for request in requests]
    tree = make_tree(sum(map(len, keys)), states=states)
    serve(tree, [bytes(16)])  # whatever is made once
    tree.reset()
    gc.collect()
    tracemalloc.start()
    for each in keys:
        # Keys are made anew, as the strings of the list above would hide the tree's own.
        serve(tree, [bytes(bytearray(key)) for key in each])
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stats = tree.stats()
    kept = sum(tree.window_stats(name).device_pages for name in tree.windows)
    return {
        "bytes_a_page": used / (stats.device_pages + kept),
        "pages": stats.device_pages,
        "states": kept,
        "pages_a_node": stats.device_pages / stats.nodes,
    }


def replay(path: Path) -> dict[str, float]:
    """Requests a second of a whole trace, one page a block, device and host smaller than what it uses."""
    requests = read_trace(path)
    options = ReplayOptions(page_size=512, block_tokens=512, l1_pages=4000, l2_pages=20_000, data=False)
    with Replay(requests, options) as run:
        begin = time.process_time()
        report = run.run()
        used = time.process_time() - begin
    return {
        "requests": report.requests,
        "requests_a_second": report.requests / report.seconds,
        "requests_a_processor_second": report.requests / used,
        "hits": report.hits,
    }


def draw(curve: list[dict[str, float]]) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), constrained_layout=True)
    sizes = [point["tokens"] for point in curve]
    axes.plot(sizes, [point["match_ms"] for point in curve], "o-", label="match")
    axes.plot(sizes, [point["insert_ms"] for point in curve], "s-", label="evict, allocate, insert")
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens in the tree", ylabel="median of a request, ms")
    axes.set_title(f"A request of {REQUEST_PAGES} pages, half of them cached, in a full tree", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "tree.png", dpi=150)


def main() -> None:
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    results["long_prompt"] = prompt = long_prompt()
    print(f"32768 tokens, half cached: {prompt['median_ms']:.3f} ms (limit {LIMIT_MILLISECONDS})")
    results["memory"] = []
    chats = make_trace(3000)
    shapes = [
        ("chats, 8 pages a block", chats, 8, False),
        ("chats, a page a block", chats, 1, False),
        ("chats, a page a block, a state a request", chats, 1, True),
    ]
    if len(sys.argv) > 1:
        shapes.insert(2, ("the trace, a page a block", read_trace(Path(sys.argv[1])), 1, False))
    for name, requests, pages_a_block, states in shapes:
        used = {"shape": name, **memory(requests, pages_a_block, states=states)}
        results["memory"].append(used)
        print(
            f"memory, {name}: {used['bytes_a_page']:.0f} bytes a page at {used['pages_a_node']:.1f} pages a node "
            f"(limit {LIMIT_BYTES:.0f})"
        )
    results["against_size"] = curve = []
    for size in SIZES:
        curve.append(against_size(size))
        print(
            "{tokens:>9} tokens, {nodes:>6} nodes: match {match_ms:.3f} ms, insert {insert_ms:.3f} ms".format(
                **curve[-1]
            )
        )
    if len(sys.argv) > 1:
        results["replay"] = replayed = replay(Path(sys.argv[1]))
        print(
            f"replay: {replayed['requests_a_second']:.0f} requests a second (limit {LIMIT_REQUESTS:.0f}), "
            f"{replayed['requests_a_processor_second']:.0f} a second of processor time"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tree.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(curve)


if __name__ == "__main__":
    main()
