"""HostPoolGroup: entries, capabilities, resolve and release, and reclaim that helps, fails, or calls back."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_pools import NullPoolHost
from hicache_pools.group import (
    REQUIRED_POOL_ATTRIBUTES,
    HostPoolGroup,
    PoolEntry,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)


def entry(name: str, pages: int, page_size: int = 1, **fields: Any) -> PoolEntry:
    return PoolEntry(name, NullPoolHost(pages, page_size), None, lambda layer: layer, **fields)


def group_of(**pages: int) -> HostPoolGroup:
    return HostPoolGroup([entry(name, count) for name, count in pages.items()])


def transfer(name: str, count: int, **fields: Any) -> PoolTransfer:
    return PoolTransfer(name, device_indices=torch.arange(count), **fields)


def state(transfers: list[PoolTransfer]) -> list[tuple[Any, ...]]:
    return [(t.host_indices, t.device_indices, t.host_from_group, t.device_from_group) for t in transfers]


def free_slots(group: HostPoolGroup) -> dict[str, int]:
    return {str(e.name): group.available_size(e.name) for e in group.entries}


class Lacking:
    """A pool without one attribute."""

    def __init__(self, missing: str) -> None:
        pool = NullPoolHost(4, 1)
        for name in REQUIRED_POOL_ATTRIBUTES:
            if name != missing:
                setattr(self, name, getattr(pool, name))


# -- entries


def test_the_marked_entry_is_the_anchor_wherever_it_stands() -> None:
    group = HostPoolGroup([entry("swa", 2), entry("kv", 6, 2, is_primary_index_anchor=True), entry("mamba", 3)])
    assert group.anchor_entry.name == "kv"
    assert (group.size, group.page_size, group.layout, str(group.device)) == (12, 2, "page_first", "cpu")
    assert group.available_size() == 12
    assert group.available_size("swa") == 2


def test_the_first_entry_is_the_anchor_when_none_is_marked() -> None:
    group = group_of(swa=2, kv=4)
    assert group.anchor_entry is group.entries[0] is group.get_entry()
    assert group.get_pool(PoolName.KV) is group.entries[1].host_pool


def test_entries_and_their_map_cannot_be_written() -> None:
    group = group_of(kv=4, swa=2)
    assert list(group.entry_map) == ["kv", "swa"]
    assert group.entry_map[PoolName.SWA] is group.entries[1]
    with pytest.raises(TypeError):
        group.entry_map["x"] = group.entries[0]  # type: ignore[index]
    assert isinstance(group.entries, tuple)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KeyError, match=r"mamba.*kv"):
        group_of(kv=4).get_pool("mamba")


def test_a_group_without_entries_is_an_error() -> None:
    with pytest.raises(ValueError, match="entries is empty"):
        HostPoolGroup([])


def test_a_name_given_twice_is_an_error_from_both_ways_in() -> None:
    with pytest.raises(ValueError, match="swa"):
        HostPoolGroup([entry("kv", 2), entry("swa", 2), entry(PoolName.SWA, 2)])
    group = group_of(kv=4, swa=2)
    before = group.entries
    with pytest.raises(ValueError, match="swa"):
        group.add_entry(entry("swa", 2))
    assert group.entries == before


def test_a_second_anchor_is_an_error_from_both_ways_in() -> None:
    marked = entry("swa", 2, is_primary_index_anchor=True)
    with pytest.raises(ValueError, match=r"kv.*swa"):
        HostPoolGroup([entry("kv", 2, is_primary_index_anchor=True), marked])
    group = group_of(kv=4)
    before = group.entries
    with pytest.raises(ValueError, match=r"swa.*kv"):
        group.add_entry(marked)
    assert group.entries == before
    assert group.anchor_entry.name == "kv"


@pytest.mark.parametrize("missing", REQUIRED_POOL_ATTRIBUTES)
def test_a_pool_without_a_required_attribute_is_an_error_from_both_ways_in(missing: str) -> None:
    lacking = PoolEntry("swa", Lacking(missing), None, lambda layer: layer)
    with pytest.raises(TypeError, match=rf"entry swa is a Lacking without {missing};"):
        HostPoolGroup([entry("kv", 2), lacking])
    group = group_of(kv=4)
    before = group.entries
    with pytest.raises(TypeError, match=rf"without {missing};"):
        group.add_entry(lacking)
    assert group.entries == before


def test_capabilities_are_all_and_any_of_the_pools_and_added_pools_count() -> None:
    def jit(name: str, can: bool) -> PoolEntry:
        made = entry(name, 2)
        made.host_pool.can_use_write_back_jit = can
        return made

    group = HostPoolGroup([jit("kv", True)])
    assert (group.can_use_write_back_jit, group.supports_per_pool_backup_indices) == (True, True)
    group.add_entry(jit("swa", False))
    assert (group.can_use_write_back_jit, group.supports_per_pool_backup_indices) == (False, True)
    assert set(group.capabilities()) == {"kv", "swa"}
    plain = HostPoolGroup([jit("kv", False)])
    assert (plain.can_use_write_back_jit, plain.supports_per_pool_backup_indices) == (False, False)


def test_clear_frees_every_pool_and_destroy_reaches_every_pool_twice_over() -> None:
    group = group_of(kv=4, swa=2)
    group.alloc(3)
    group.alloc(2, "swa")
    group.clear()
    assert free_slots(group) == {"kv": 4, "swa": 2}

    destroyed = []

    def fail() -> None:
        raise OSError("no")

    group.entries[0].host_pool.destroy = fail
    group.entries[1].host_pool.destroy = lambda: destroyed.append("swa")
    with pytest.raises(OSError, match="no"):
        group.destroy()
    assert destroyed == ["swa"]
    group = group_of(kv=4, swa=2)
    group.destroy()
    group.destroy()


# -- resolve and release


def test_resolve_gives_host_slots_and_release_takes_them_back() -> None:
    group = group_of(kv=8, swa=4, mamba=2)
    primary = group.alloc(3)
    assert primary is not None
    transfers = [transfer("swa", 3), transfer("mamba", 1, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    before = state(transfers)
    resolved = group.resolve_host_transfers(
        transfers, primary_device_indices=torch.arange(3), primary_host_indices=primary
    )
    assert resolved is not None
    assert all(a is b for a, b in zip(resolved, transfers, strict=True))
    assert [t.host_indices.tolist() for t in transfers if t.host_indices is not None] == [[0, 1, 2], [0]]
    assert free_slots(group) == {"kv": 5, "swa": 1, "mamba": 1}
    assert group.release_transfers(transfers) == 4
    assert group.release_transfers(transfers) == 0
    assert [s[0] for s in state(transfers)] == [s[0] for s in before]
    assert free_slots(group) == {"kv": 5, "swa": 4, "mamba": 2}


def test_nothing_to_resolve_is_none() -> None:
    group = group_of(kv=1)
    assert group.resolve_host_transfers(None) is None
    assert group.resolve_host_transfers([]) is None
    assert group.resolve_device_transfers([]) is None
    assert group.release_transfers(None) == 0


def test_derived_transfers_share_their_sources_indices_through_chains_and_take_no_slots() -> None:
    group = group_of(kv=8, swa=4, indexer=8, state=4, tail=4)
    primary_host, primary_device = group.alloc(5), torch.randperm(5)
    transfers = [
        PoolTransfer("tail", indices_from_pool="state"),
        PoolTransfer("indexer", indices_from_pool=PoolName.KV),
        PoolTransfer("state", indices_from_pool="swa"),
        transfer("swa", 2),
    ]
    before = state(transfers)
    resolve: dict[str, Any] = {"primary_device_indices": primary_device, "primary_host_indices": primary_host}
    assert group.resolve_host_transfers(transfers, **resolve) is not None
    tail, indexer, derived_state, swa = transfers
    assert indexer.host_indices is primary_host
    assert indexer.device_indices is primary_device
    assert tail.host_indices is derived_state.host_indices is swa.host_indices is not None
    assert tail.device_indices is swa.device_indices
    assert free_slots(group) == {"kv": 3, "swa": 2, "indexer": 8, "state": 4, "tail": 4}

    assert group.release_transfers([tail, indexer, derived_state]) == 0
    assert group.available_size("swa") == 2
    assert swa.host_indices is not None
    assert group.release_transfers([swa]) == 2
    assert [s[:2] for s in state(transfers)] == [s[:2] for s in before]


def test_slots_a_transfer_came_with_are_neither_taken_again_nor_released() -> None:
    group = group_of(kv=4, swa=4)
    own = group.alloc(2, "swa")
    given = PoolTransfer("swa", host_indices=own, device_indices=torch.arange(2))
    assert group.resolve_host_transfers([given]) is not None
    assert given.host_indices is own
    assert group.release_transfers([given]) == 0
    assert given.host_indices is own
    assert group.available_size("swa") == 2


def test_keys_size_a_transfer_that_comes_from_storage() -> None:
    group = HostPoolGroup([entry("kv", 4, 16), entry("swa", 4, 16)])
    fetched = PoolTransfer("swa", keys=[b"a", b"b", b"c"])
    assert group.resolve_host_transfers([fetched]) is not None
    assert fetched.host_indices is not None
    assert fetched.host_indices.numel() == 48
    assert group.release_transfers([fetched]) == 48


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([PoolTransfer("swa")], "none of host_indices"),
        ([transfer("swa", 2)] * 2, "one transfer twice"),
        ([transfer("swa", 3)], "page size 2"),
        ([PoolTransfer("indexer", indices_from_pool="kv")], "0 transfers"),
        ([PoolTransfer("indexer", indices_from_pool="swa"), transfer("swa", 2), transfer("swa", 2)], "2 transfers"),
        ([PoolTransfer("indexer", indices_from_pool="nothing")], "nothing, of which"),
        ([PoolTransfer("indexer", indices_from_pool="indexer")], "itself"),
        (
            [PoolTransfer("indexer", indices_from_pool="swa"), PoolTransfer("swa", indices_from_pool="indexer")],
            "itself",
        ),
        (
            [PoolTransfer("indexer", host_indices=torch.arange(2), indices_from_pool="swa"), transfer("swa", 2)],
            "none of its own",
        ),
    ],
)
def test_a_bad_transfer_is_named_and_nothing_is_changed(bad: list[PoolTransfer], message: str) -> None:
    group = HostPoolGroup([entry("kv", 4, 2), entry("indexer", 4, 2), entry("mamba", 4), entry("swa", 4, 2)])
    transfers = [transfer("mamba", 2), *bad]
    before, slots = state(transfers), free_slots(group)
    with pytest.raises(ValueError, match=message):
        group.resolve_host_transfers(transfers)
    assert state(transfers) == before
    assert free_slots(group) == slots


def test_an_unknown_pool_is_an_error_and_nothing_is_changed() -> None:
    group = group_of(kv=4, swa=4)
    transfers = [transfer("swa", 2), transfer("mamba", 2)]
    with pytest.raises(KeyError, match="mamba"):
        group.resolve_host_transfers(transfers)
    assert group.available_size("swa") == 4
    assert transfers[0].host_indices is None


@pytest.mark.parametrize("short", range(4))
@pytest.mark.parametrize("raises", [False, True])
def test_a_failure_at_any_step_gives_every_slot_back_and_leaves_transfers_alone(short: int, raises: bool) -> None:
    names = ["a", "b", "c", "d"]
    group = HostPoolGroup([entry("kv", 4), *(entry(name, 3) for name in names)])
    transfers = [transfer(name, random.randrange(1, 4)) for name in names]
    random.shuffle(transfers)
    before, slots = state(transfers), free_slots(group)

    def fail(_: int) -> torch.Tensor | None:
        if raises:
            raise MemoryError("no")
        return None

    pool = group.get_pool(names[short])
    pool.alloc = fail
    if raises:
        with pytest.raises(MemoryError, match="no"):
            group.resolve_host_transfers(transfers)
    else:
        assert group.resolve_host_transfers(transfers) is None
    assert state(transfers) == before
    assert free_slots(group) == slots


def test_a_pool_that_will_not_take_slots_back_does_not_keep_the_others_from_theirs() -> None:
    group = group_of(a=3, b=3, c=0 + 1)
    real = group.get_pool("b").free

    def fail(_: torch.Tensor) -> int:
        raise OSError("no")

    group.get_pool("b").free = fail
    assert group.resolve_host_transfers([transfer(n, 2) for n in "abc"]) is None
    assert group.available_size("a") == 3

    group.get_pool("b").free = real
    group.clear()
    transfers = [transfer("a", 2), transfer("b", 2)]
    assert group.resolve_host_transfers(transfers) is not None
    group.get_pool("b").free = fail
    with pytest.raises(OSError, match="no"):
        group.release_transfers(list(reversed(transfers)))
    assert transfers[0].host_indices is None
    assert transfers[1].host_indices is not None  # still owned, so it can be tried again
    group.get_pool("b").free = real
    assert group.release_transfers(transfers) == 2


def listen(member: PoolEntry, asked: list[str]) -> None:
    alloc = member.host_pool.alloc

    def noted(n: int) -> torch.Tensor | None:
        asked.append(str(member.name))
        slots: torch.Tensor | None = alloc(n)
        return slots

    member.host_pool.alloc = noted


def test_pools_are_asked_in_the_order_of_names_whatever_the_list_and_the_group_say() -> None:
    for names in itertools.permutations(["a", "b", "c"]):
        asked: list[str] = []
        group = HostPoolGroup([entry(name, 2) for name in names])
        for member in group.entries:
            listen(member, asked)
        order = random.sample(names, 3)
        assert group.resolve_host_transfers([transfer(name, 1) for name in order]) is not None
        assert asked == ["a", "b", "c"]


# -- reclaim


def reclaiming(group: HostPoolGroup, name: str, held: list[torch.Tensor], calls: list[int]) -> Callable[[int], None]:
    """Free slots held in pool ``name`` until there are enough."""

    def evict(slots: int) -> None:
        calls.append(slots)
        while held and slots > 0:
            slots -= group.free(held.pop(), name)

    return evict


def test_reclaim_is_asked_once_for_what_is_missing_and_the_allocation_goes_on() -> None:
    group, calls = group_of(kv=4, swa=8), list[int]()
    held = [slots for slots in (group.alloc(2, "swa") for _ in range(3)) if slots is not None]
    group.get_entry("swa").host_evict_fn = reclaiming(group, "swa", held, calls)
    one = transfer("swa", 5)
    assert group.resolve_host_transfers([one]) is not None
    assert calls == [3]
    assert group.available_size("swa") == 1
    assert group.release_transfers([one]) == 5


def test_alloc_reclaims_as_resolve_does() -> None:
    group, calls = group_of(kv=4), list[int]()
    held = [group.alloc(4)]
    group.get_entry().host_evict_fn = reclaiming(group, "kv", held, calls)  # type: ignore[arg-type]
    taken = group.alloc(3)
    assert taken is not None
    assert calls == [3]
    assert group.alloc(2) is None
    assert calls == [3, 1]
    assert group.free(taken) == 3


def test_reclaim_of_the_caller_is_asked_for_all_slots_in_place_of_the_entry() -> None:
    group, calls = group_of(kv=1, swa=5), list[int]()
    held = group.alloc(4, pool="swa")
    assert held is not None
    group.get_entry("swa").host_evict_fn = lambda _: pytest.fail("the entry was asked")
    assert group.alloc(1, pool="swa", reclaim=lambda _: pytest.fail("there was room")) is not None
    assert group.alloc(3, pool="swa", reclaim=calls.append) is None
    taken = group.alloc(3, pool="swa", reclaim=lambda n: (calls.append(n), group.free(held, pool="swa")))
    assert taken is not None
    assert calls == [3, 3]
    assert group.available_size(pool="swa") == 1


def test_reclaim_that_frees_too_little_is_asked_once_and_nothing_is_taken() -> None:
    group, calls = group_of(kv=4, mamba=4, swa=4), list[int]()
    held = group.alloc(3, "swa")
    assert held is not None
    group.get_entry("swa").host_evict_fn = lambda n: (calls.append(n), group.free(held[:1], "swa"))
    transfers = [transfer("mamba", 2), transfer("swa", 4)]
    before = state(transfers)
    assert group.resolve_host_transfers(transfers) is None
    assert calls == [3]
    assert state(transfers) == before
    assert free_slots(group) == {"kv": 4, "mamba": 4, "swa": 2}


def test_reclaim_that_raises_after_freeing_enough_still_helps() -> None:
    group = group_of(kv=4)
    held = group.alloc(4)
    assert held is not None

    def evict(_: int) -> None:
        group.free(held)
        raise RuntimeError("and then something broke")

    group.get_entry().host_evict_fn = evict
    assert group.alloc(4) is not None


def test_reclaim_that_raises_without_freeing_is_none_and_nothing_is_taken() -> None:
    group = group_of(kv=4, mamba=4, swa=4)
    group.alloc(4, "swa")

    def evict(_: int) -> None:
        raise RuntimeError("broken")

    group.get_entry("swa").host_evict_fn = evict
    transfers = [transfer("mamba", 2), transfer("swa", 1)]
    before = state(transfers)
    assert group.resolve_host_transfers(transfers) is None
    assert state(transfers) == before
    assert group.available_size("mamba") == 4


def test_reclaim_sees_every_slot_the_operation_had_taken_so_far() -> None:
    group, seen = group_of(kv=4, mamba=4, swa=4), list[dict[str, int]]()
    group.alloc(4, "swa")
    group.get_entry("swa").host_evict_fn = lambda _: seen.append(free_slots(group))
    assert group.resolve_host_transfers([transfer("mamba", 3), transfer("swa", 1)]) is None
    assert seen == [{"kv": 4, "mamba": 4, "swa": 0}]


def test_reclaim_that_enters_the_group_again_neither_hangs_nor_recurses() -> None:
    group, calls = group_of(kv=4, mamba=4, swa=4), list[int]()
    held = group.alloc(4, "swa")
    assert held is not None

    def evict(slots: int) -> None:
        calls.append(slots)
        inner = [transfer("swa", 2), transfer("mamba", 1)]
        assert group.resolve_host_transfers(inner) is None
        assert group.alloc(1, "swa") is None
        group.free(held[:3], "swa")
        assert group.resolve_host_transfers(inner) is not None
        group.release_transfers(inner)

    group.get_entry("swa").host_evict_fn = evict
    transfers = [transfer("swa", 3), transfer("mamba", 4)]
    assert group.resolve_host_transfers(transfers) is not None
    assert calls == [3]
    assert free_slots(group) == {"kv": 4, "mamba": 0, "swa": 0}


def test_reclaim_that_takes_what_it_freed_leaves_the_operation_with_nothing() -> None:
    group = group_of(kv=4, mamba=4, swa=4)
    held = group.alloc(4, "swa")
    assert held is not None

    def evict(_: int) -> None:
        group.free(held, "swa")
        group.alloc(3, "swa")
        group.alloc(3, "mamba")

    group.get_entry("swa").host_evict_fn = evict
    transfers = [transfer("mamba", 1), transfer("swa", 2)]
    assert group.resolve_host_transfers(transfers) is None
    assert free_slots(group) == {"kv": 4, "mamba": 1, "swa": 1}


def test_two_short_pools_are_each_asked_once() -> None:
    group = group_of(kv=4, mamba=2, swa=2)
    calls: dict[str, list[int]] = {"mamba": [], "swa": []}
    for name, of_pool in calls.items():
        held = group.alloc(2, name)
        assert held is not None
        group.get_entry(name).host_evict_fn = reclaiming(group, name, [held], of_pool)
    transfers = [transfer("swa", 1), transfer("swa", 1), transfer("mamba", 2)]
    assert group.resolve_host_transfers(transfers) is not None
    assert calls == {"mamba": [2], "swa": [2]}


def test_reclaim_that_resolves_the_same_transfers_is_an_error_and_loses_no_slot() -> None:
    group = group_of(kv=4, mamba=4, swa=4)
    held = group.alloc(4, "swa")
    assert held is not None
    transfers = [transfer("mamba", 1), transfer("swa", 2)]

    def evict(_: int) -> None:
        group.free(held, "swa")
        assert group.resolve_host_transfers(transfers) is not None

    group.get_entry("swa").host_evict_fn = evict
    with pytest.raises(RuntimeError, match="a reclaim callback filled transfers in"):
        group.resolve_host_transfers(transfers)
    assert free_slots(group) == {"kv": 4, "mamba": 3, "swa": 2}
    assert group.release_transfers(transfers) == 3
    assert free_slots(group) == {"kv": 4, "mamba": 4, "swa": 4}


def test_reclaim_that_destroys_the_pool_is_an_error_and_loses_no_slot() -> None:
    group = group_of(kv=4, mamba=4, swa=4)
    group.alloc(4, "swa")
    group.get_entry("swa").host_evict_fn = lambda _: group.get_pool("swa").destroy()
    with pytest.raises(RuntimeError, match="has been destroyed"):
        group.resolve_host_transfers([transfer("mamba", 1), transfer("swa", 2)])
    assert free_slots(group) == {"kv": 4, "mamba": 4, "swa": 0}


def test_an_interrupt_in_reclaim_is_passed_on_with_nothing_taken() -> None:
    group = group_of(kv=4, mamba=4, swa=1)
    group.alloc(1, "swa")

    def evict(_: int) -> None:
        raise KeyboardInterrupt

    group.get_entry("swa").host_evict_fn = evict
    with pytest.raises(KeyboardInterrupt):
        group.resolve_host_transfers([transfer("mamba", 2), transfer("swa", 1)])
    assert group.available_size("mamba") == 4
    with pytest.raises(KeyboardInterrupt):  # it is asked again next time
        group.alloc(1, "swa")


# -- device slots


def with_device(group: HostPoolGroup, name: str, slots: int) -> NullPoolHost:
    engine = NullPoolHost(slots, 1)
    member = group.get_entry(name)
    member.device_alloc_fn, member.device_free_fn = engine.alloc, engine.free
    return engine


def test_device_slots_are_resolved_all_or_nothing_as_host_slots_are() -> None:
    group = group_of(kv=4, mamba=4, swa=4)
    mamba, swa = with_device(group, "mamba", 2), with_device(group, "swa", 2)
    host = {name: group.alloc(2, name) for name in ("mamba", "swa")}
    transfers = [PoolTransfer(name, host_indices=host[name]) for name in ("swa", "mamba")]
    assert group.resolve_device_transfers(transfers) is not None
    assert (mamba.available_size(), swa.available_size()) == (0, 0)
    more = [PoolTransfer("mamba", host_indices=host["mamba"])]
    assert group.resolve_device_transfers(more) is None
    assert more[0].device_indices is None
    assert group.release_transfers(transfers) == 4
    assert (mamba.available_size(), swa.available_size()) == (2, 2)
    assert transfers[0].host_indices is host["swa"]


def test_device_reclaim_is_asked_for_all_that_is_wanted() -> None:
    group, calls = group_of(kv=4), list[int]()
    engine = with_device(group, "kv", 4)
    held = engine.alloc(4)
    assert held is not None
    group.get_entry().device_evict_fn = lambda n: (calls.append(n), engine.free(held))
    taken = group.alloc_device(3)
    assert taken is not None
    assert calls == [3]
    group.free_device(taken)
    assert engine.available_size() == 4


def test_device_slots_without_callbacks_are_an_error_that_names_them() -> None:
    group = group_of(kv=4, swa=4)
    with pytest.raises(ValueError, match="device_alloc_fn"):
        group.alloc_device(1)
    with pytest.raises(ValueError, match="swa has no device_alloc_fn"):
        group.resolve_device_transfers([PoolTransfer("swa", host_indices=group.alloc(1, "swa"))])
