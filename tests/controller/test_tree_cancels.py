"""Requests given up at any moment between their match and the end of their load: nothing is lost or left locked."""

import random
import re

import numpy as np
import torch

from hicache_controller.hashing import page_hashes
from hicache_controller.tree import UnifiedRadixCache

PAGE_SIZE = 4
DOCUMENTS, PAGES = 4, 4


def test_a_thousand_requests_given_up_between_match_and_load_and_in_the_middle_of_it(make_stack):
    stack = make_stack(device_pages=10, host_pages=DOCUMENTS * PAGES)
    tree = UnifiedRadixCache(stack.controller, stack.allocator, page_size=PAGE_SIZE)
    documents = [page_hashes(np.random.default_rng().integers(0, 1000, PAGES * PAGE_SIZE), 4) for _ in range(DOCUMENTS)]
    rows = []
    for keys in documents:
        match = tree.match_prefix(keys)
        pages = tree.alloc_device(PAGES)
        rows.append(stack.compute(slots_of(pages)))
        tree.release(tree.insert(match, pages).match)
        tree.drain()
    middle = stack.host_pool.load_gates[1]
    given_up = {"before": 0, "while": 0, "held": 0, "failed": 0}
    for number in range(1000):
        tree.evict_device(random.randint(0, 10))
        match = tree.match_prefix(documents[random.randrange(DOCUMENTS)])
        way = list(given_up)[number % 4]
        if way == "before":
            given_up[way] += match.host_pages > 0
            tree.release(match)
            continue
        if way == "held":
            middle.close()
        elif way == "failed":
            middle.failures = 1
        loading = tree.load_back(match, wait=False)
        given_up[way] += bool(loading.consumers)
        tree.release(loading)
        middle.open()
        if way == "failed":
            tree.drain()
            middle.failures = 0
    tree.drain()
    assert all(count > 20 for count in given_up.values()), given_up
    tree.check_integrity()
    stack.check_integrity()
    assert set(re.findall(r"locks (\d+)/(\d+)", tree.pretty())) == {("0", "0")}
    stats = tree.stats()
    assert stack.used() == (stats.device_pages, stats.host_pages)
    assert len(stack.controller.engine.in_flight) == 0
    for keys, wanted in zip(documents, rows, strict=True):
        match = tree.load_back(tree.match_prefix(keys))
        assert match.device_pages == PAGES
        assert stack.same(stack.rows(slots_of(tree.device_page_numbers(match))), wanted)
        tree.release(match)


def slots_of(pages):
    return torch.from_numpy((np.asarray(pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1))
