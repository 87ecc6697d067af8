"""What the tree keeps in memory for each cached page."""

from __future__ import annotations

import gc
import secrets
import tracemalloc
from collections.abc import Callable

import pytest

from hicache_controller.hashing import Namespace
from hicache_controller.hybrid import HybridCacheController
from hicache_controller.tree import Quota, UnifiedRadixCache, WindowComponent
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
    for queue in (tree._tree.order.queues.device, tree._tree.order.queues.host):
        assert len(queue) <= 64, "only the last node may leave"
    tree.check_integrity()
    assert tree.evict_device(2000) == 1000
    assert tree.evict_host(2000) == 1000


def traced_growth(work: Callable[[], object]) -> int:
    """Bytes that stay allocated after some work."""
    gc.collect()
    tracemalloc.start()
    work()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used


def new_namespace() -> Namespace:
    return Namespace(salt=secrets.token_bytes(16))


def serve_in(tree: UnifiedRadixCache, namespace: Namespace) -> None:
    match = tree.match_prefix([secrets.token_bytes(16)], namespace=namespace)
    fresh = tree.alloc_device(1)
    assert fresh is not None
    tree.release(tree.insert(match, fresh).match)
    tree.poll()


def test_a_namespace_that_is_only_looked_up_leaves_nothing() -> None:
    tree = make_tree(8)

    def look_up() -> None:
        for _ in range(2000):
            namespace = new_namespace()
            tree.release(tree.match_prefix([secrets.token_bytes(16)], namespace=namespace))
            assert tree.namespace_stats(namespace) == (0, 0)

    look_up()
    assert traced_growth(look_up) < 20_000


def test_a_namespace_goes_with_its_last_page() -> None:
    tree = make_tree(8)

    def serve_many() -> None:
        for _ in range(2000):
            serve_in(tree, new_namespace())
        tree.check_integrity()

    serve_many()
    assert traced_growth(serve_many) < 40_000
    kept = new_namespace()
    serve_in(tree, kept)
    assert tree.namespace_stats(kept) == (1, 1)
    tree.evict_device(8)
    tree.evict_host(8)
    assert tree.namespace_stats(kept) == (0, 0)


def test_reset_leaves_no_namespace_and_no_page() -> None:
    tree = make_tree(1000)

    def fill_and_reset() -> None:
        for _ in range(1000):
            serve_in(tree, new_namespace())
        tree.reset()

    fill_and_reset()
    assert traced_growth(fill_and_reset) < 40_000


def test_a_quota_outlives_the_pages_of_its_namespace_and_goes_when_it_is_lifted() -> None:
    tree = make_tree(8)
    namespace = new_namespace()
    tree.set_quota(namespace, Quota(device_pages=1, host_pages=2))
    for _ in range(2):
        for _ in range(4):
            serve_in(tree, namespace)
        assert tree.namespace_stats(namespace) == (1, 2)
        tree.reset()
        assert tree.namespace_stats(namespace) == (0, 0)
    tree.set_quota(namespace, Quota())
    for _ in range(4):
        serve_in(tree, namespace)
    assert tree.namespace_stats(namespace) == (4, 4)

    def limit_and_lift() -> None:
        for _ in range(2000):
            other = new_namespace()
            tree.set_quota(other, Quota(device_pages=1))
            tree.set_quota(other, Quota())

    limit_and_lift()
    assert traced_growth(limit_and_lift) < 20_000
