"""The quota of CTAs, from the calls of a pool to the plan of its transfer."""

import pytest
import torch
from tests.conftest import needs

from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, NullPoolHost

PAGES, PAGE_SIZE, LAYERS = 5, 16, 2


@pytest.fixture
def make_pool(bench):
    made = []

    def make(**options):
        device_pool = MHATokenToKVPool(PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, 2, 8, LAYERS, "cpu")
        bench.fill(device_pool)
        made.append(MHATokenToKVPoolHost(device_pool, 1.0, 0, PAGE_SIZE, pin_memory=False, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.destroy()


def rows(pool):
    return [t.view(torch.uint8).clone() for c in pool.device_pool.components for t in c.tensors]


def calls(pool, slots, **options):
    """Every way to move slots."""
    return {
        "write": lambda: pool.backup_from_device_all_layer(None, slots, slots, **options),
        "layer": lambda: pool.load_to_device_per_layer(None, slots, slots, 1, **options),
        "all": lambda: pool.load_to_device_all_layer(None, slots, slots, **options),
        "draft": lambda: (
            pool.load_to_device_per_layer(pool.packed_draft_device_pools[0], slots, slots, 0, **options)
            if pool.packed_draft_device_pools
            else pool.load_to_device_per_layer(None, slots, slots, 0, **options)
        ),
    }


@pytest.mark.parametrize("policy", ["auto", "direct"])
def test_a_quota_of_0_takes_no_path_that_holds_sms(make_pool, bench, policy):
    pool = make_pool(transfer_policy=policy)
    needs(pool.capabilities().direct, "no direct path here to forbid: " + pool.capabilities().reason)
    slots = bench.slots(torch.randperm(PAGES), PAGE_SIZE)
    for name, call in calls(pool, slots).items():
        assert call().path == "direct", name
    for name, call in calls(pool, slots, block_quota=0).items():
        result = call()
        assert result.path != "direct", name
        assert "block_quota is 0" in result.reason, name


def test_the_bytes_are_the_same_with_any_quota(make_pool, bench):
    pool = make_pool()
    slots = bench.slots(torch.randperm(PAGES), PAGE_SIZE)
    before = rows(pool)
    for quota in (None, 0, 1, 3):
        pool.buffer.copy_(bench.random_bytes(pool.buffer.numel()))
        pool.backup_from_device_all_layer(None, slots, slots, block_quota=quota)
        bench.fill(pool.device_pool)
        pool.load_to_device_all_layer(None, slots, slots, block_quota=quota)
        after = rows(pool)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), quota


@pytest.mark.parametrize("quota", [None, 0, 1, 7])
def test_the_quota_reaches_the_transfer_of_every_call(make_pool, bench, monkeypatch, quota):
    pool = make_pool()
    seen = []

    def spying(inner):
        def call(*args, **options):
            seen.append(options["block_quota"])
            return inner(*args, **options)

        return call

    for name in ("write_back", "load"):
        monkeypatch.setattr(pool.transfer, name, spying(getattr(pool.transfer, name)))
    for call in calls(pool, bench.slots(torch.arange(2), PAGE_SIZE), block_quota=quota).values():
        call()
    assert seen == [quota] * 4
    pool.backup_from_device_all_layer(None, *[bench.slots(torch.arange(2), PAGE_SIZE)] * 2, "direct", block_quota=quota)
    assert seen[-1] == 0


@pytest.mark.parametrize(("quota", "error"), [(-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_a_quota_that_is_none_raises_and_moves_nothing(make_pool, bench, quota, error):
    pool = make_pool()
    pool.buffer.copy_(bench.random_bytes(pool.buffer.numel()))
    before = pool.buffer.clone(), rows(pool)
    for call in calls(pool, bench.slots(torch.arange(2), PAGE_SIZE), block_quota=quota).values():
        with pytest.raises(error, match="block_quota is "):
            call()
    assert torch.equal(pool.buffer, before[0])
    after = rows(pool)
    assert all(torch.equal(a, b) for a, b in zip(after, before[1], strict=True))


def test_a_pool_without_bytes_takes_a_quota():
    pool, slots = NullPoolHost(4, 2), torch.arange(4)
    for call in calls(pool, slots, block_quota=2).values():
        assert call().bytes == 0
