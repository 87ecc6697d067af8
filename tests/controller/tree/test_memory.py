"""What the tree keeps in memory for each cached page."""

from __future__ import annotations

import gc
import secrets
import tracemalloc

import pytest

from hicache_controller.hybrid import HybridCacheController
from hicache_controller.tree import UnifiedRadixCache, WindowComponent
from hicache_pools import ExtentAllocator, HostPoolGroup, NullPoolHost, PoolEntry


def make_tree(pages: int, *, states: bool = False) -> UnifiedRadixCache:
    allocators = {name: ExtentAllocator(pages, 1) for name in ("kv", *(["mamba"] if states else []))}
    entries = [
        PoolEntry(
            name,
            NullPoolHost(pages, 1),
            None,
            lambda layer: layer,
            device_alloc_fn=allocator.alloc,
            device_free_fn=allocator.free,
        )
        for name, allocator in allocators.items()
    ]
    controller = HybridCacheController(HostPoolGroup(entries), synchronous=True)
    components = [WindowComponent.recurrent_state()] if states else []
    return UnifiedRadixCache(controller, allocators["kv"], page_size=1, components=components)


def serve(tree: UnifiedRadixCache, keys: list[bytes]) -> None:
    match = tree.match_prefix(keys)
    fresh = tree.alloc_device(len(keys) - match.pages)
    assert fresh is not None
    windows = {name: tree.alloc_window(name, 1) for name in tree.windows}
    tree.release(tree.insert(match, fresh, windows=windows).match)
    tree.poll()


@pytest.mark.parametrize(
    ("turns", "pages_a_turn", "states"),
    [(1, 8, False), (8, 3, False), (8, 4, True)],
    ids=["a block of eight pages", "chats that grow by three pages", "with a state every four pages"],
)
def test_a_cached_page_takes_less_than_200_bytes(turns: int, pages_a_turn: int, states: bool) -> None:
    chats, length = 100, turns * pages_a_turn
    tree = make_tree(chats * length, states=states)
    serve(tree, [secrets.token_bytes(16)])  # whatever is made once
    tree.reset()
    gc.collect()
    tracemalloc.start()
    for _ in range(chats):
        chat = [secrets.token_bytes(16) for _ in range(length)]
        for turn in range(turns):
            serve(tree, chat[: (turn + 1) * pages_a_turn])
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.stats() == (chats * turns, chats * length, chats * length)
    assert used / (chats * length + (chats * turns if states else 0)) < 200


def test_queues_forget_nodes_that_got_children() -> None:
    tree = make_tree(2000)
    chat: list[bytes] = []
    for _ in range(1000):
        chat.append(secrets.token_bytes(16))
        serve(tree, chat)
    for queue in (tree._device_queue, tree._host_queue):
        assert len(queue) <= 64, "only the last node may leave"
    tree.check_integrity()
    assert tree.evict_device(2000) == 1000
    assert tree.evict_host(2000) == 1000
