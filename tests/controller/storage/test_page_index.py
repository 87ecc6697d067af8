"""The eviction order against a naive model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_controller.storage.page_index import PageIndex

keys = st.integers(0, 15).map(lambda n: bytes([n]))
parts = st.sampled_from(["kv", "swa"])


class PageIndexMachine(RuleBasedStateMachine):
    """A page is {part: size}, a parent and a time; a parent was used when its child was, once the child is gone."""

    def __init__(self):
        super().__init__()
        self.index = PageIndex()
        self.pages = {}
        self.time = 0

    def now(self):
        self.time += 1
        return self.time

    def leaves(self, keep=()):
        parents = {page["parent"] for page in self.pages.values()}
        return [k for k in self.pages if k not in parents and k not in keep]

    def drop(self, key):
        gone = self.pages.pop(key)
        if gone["parent"] in self.pages:
            parent = self.pages[gone["parent"]]
            parent["tick"] = max(parent["tick"], gone["tick"])

    @rule(key=keys, part=parts, size=st.integers(0, 9), parent=st.none() | keys)
    def add(self, key, part, size, parent):
        if parent is not None and parent >= key:
            parent = None
        tick = self.now()
        self.index.add(key, part, size, parent, tick)
        page = self.pages.setdefault(key, {"parts": {}, "parent": parent, "tick": 0})
        page["parts"][part] = size
        page["tick"] = tick

    @rule(key=keys)
    def touch(self, key):
        tick = self.now()
        self.index.touch(key, tick)
        if key in self.pages:
            self.pages[key]["tick"] = tick

    @rule(key=keys, part=parts)
    def remove_part(self, key, part):
        self.index.remove_part(key, part)
        if part in self.pages.get(key, {"parts": {}})["parts"]:
            del self.pages[key]["parts"][part]
            if not self.pages[key]["parts"]:
                self.drop(key)

    @rule(keep=st.sets(keys, max_size=4))
    def evict(self, keep):
        found = self.index.oldest_leaf(keep)
        leaves = self.leaves(keep)
        assert (found is None) == (not leaves)
        if found is not None:
            assert found.key == min(leaves, key=lambda k: self.pages[k]["tick"])
            self.index.remove(found.key)
            self.drop(found.key)

    @rule()
    def clear(self):
        self.index.clear()
        self.pages.clear()

    @invariant()
    def agrees(self):
        self.index.check_integrity()
        assert {e.key: dict(e.parts) for e in self.index} == {k: p["parts"] for k, p in self.pages.items()}
        assert self.index.total_bytes == sum(sum(p["parts"].values()) for p in self.pages.values())


TestPageIndex = PageIndexMachine.TestCase
TestPageIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda i: setattr(i, "total_bytes", 1), "total_bytes is 1"),
        (lambda i: i._children.clear(), "counts of children"),
        (lambda i: i._leaves.clear(), "not queued"),
        (lambda i: i._leaves.append(i._leaves[0]), "twice"),
    ],
)
def test_a_broken_index_is_noticed(break_it, words):
    index = PageIndex()
    index.add(b"a", "kv", 10, None, 1)
    index.add(b"b", "kv", 10, b"a", 2)
    index.check_integrity()
    break_it(index)
    with pytest.raises(RuntimeError, match=words):
        index.check_integrity()
