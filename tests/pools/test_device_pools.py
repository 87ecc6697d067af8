"""Device pools describe what an engine has, in the shapes it has it in, and refuse what they cannot address."""

from collections.abc import Callable

import pytest
import torch

from hicache_pools import (
    BufferForm,
    DeepSeekV4PagedPool,
    DeepSeekV4StatePool,
    DevicePool,
    DSATokenToKVPool,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    component_from_tensors,
)
from hicache_pools.simulation import fill_randomly, read_slots


def test_every_pool_reads_the_bytes_its_tensors_hold(bench, case_name):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    pool = case.make(6, page_size, "cpu")
    bench.fill(pool)
    slots = bench.slots(torch.randperm(6)[:4], page_size)
    names = case.components or [component.name for component in pool.components]
    found = read_slots(pool, slots)
    for name, rows in zip(names, case.rows(pool), strict=True):
        per_row = pool.component(name).slots_per_row
        assert torch.equal(found[name], torch.stack(rows)[:, slots[::per_row] // per_row])


def test_from_buffers_copies_nothing_and_keeps_the_tensors_readable(bench):
    k, v = bench.layers((32, 2, 8), torch.bfloat16, "cpu"), bench.layers((32, 2, 4), torch.bfloat16, "cpu")
    pool = MHATokenToKVPool.from_buffers(k=k, v=v, page_size=4)
    assert all(ours is theirs for ours, theirs in zip(pool.k_buffer + pool.v_buffer, k + v, strict=True))
    assert (pool.size, pool.page_size, pool.layer_num, pool.device.type) == (32, 4, 2, "cpu")
    assert (pool.head_num, pool.head_dim, pool.v_head_dim) == (2, 8, 4)
    assert pool.size_bytes == sum(t.numel() * t.element_size() for t in k + v)


def test_pools_of_states_name_their_components(bench):
    def states(*shape, dtype=torch.float32):
        return bench.layers((5, *shape), dtype, "cpu")

    one = MambaPool.from_buffers(conv=states(4, 3), temporal=states(2, 2), side=states(7, dtype=torch.uint8))
    several = MambaPool.from_buffers(
        conv=[states(4, 3), states(2, 3)], temporal=states(2, 2), side={"steps": states(1, dtype=torch.int64)}
    )
    assert [c.name for c in one.components] == ["conv[0]", "temporal", "side[0]"]
    assert [c.name for c in several.components] == ["conv[0]", "conv[1]", "temporal", "side[steps]"]
    assert [c.element_bytes for c in several.components] == [48, 24, 16, 8]


def test_a_model_may_keep_convolution_states_alone(bench):
    pool = MambaPool.from_buffers(conv=bench.layers((5, 4, 3), torch.bfloat16, "cpu"))
    assert [c.name for c in pool.components] == ["conv[0]"]
    assert pool.temporal_buffer == []
    host = MambaPoolHost(pool, 2.0, 0)
    assert host.page_bytes == 2 * 24
    with pytest.raises(ValueError, match="component 'temporal' is not in this MambaPoolHost"):
        _ = host.temporal_buffer


def test_two_joined_blocks_are_keys_and_values_first_and_views_say_otherwise():
    kv = [torch.arange(2 * 2 * 4 * 2).view(2, 2, 4, 1, 2)]
    assert torch.equal(mha(kv=kv, page_size=4).v_buffer[0], kv[0][1])
    by_block = mha(k=[t[:, 0] for t in kv], v=[t[:, 1] for t in kv], page_size=4)
    assert torch.equal(read_slots(by_block, torch.arange(8))["v"].view(torch.int64).flatten(), kv[0][:, 1].flatten())


def test_a_stacked_tensor_is_taken_layer_by_layer():
    stacked = torch.zeros((3, 8, 4, 3))
    pool = MambaPool.from_buffers(conv=stacked.unbind(0), temporal=torch.zeros((3, 8, 2)).unbind(0))
    fill_randomly(pool)
    assert torch.equal(
        read_slots(pool, torch.tensor([5]))["conv[0]"].flatten(), stacked[:, 5].flatten().view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("shape", "slots"), [((12, 20), 12), ((12, 1, 20), 12), ((3, 4, 20), 12), ((3, 4, 1, 20), 12), ((12, 1, 1, 20), 12)]
)
def test_latents_are_taken_in_every_shape(bench, shape, slots):
    pool = MLATokenToKVPool.from_buffers(kv=bench.layers(shape, torch.bfloat16, "cpu"), page_size=4)
    assert (pool.size, pool.kv_cache_dim) == (slots, 20)


def test_an_index_translation_widens_the_indices_and_not_the_slots(bench):
    kv = bench.layers((12, 20), torch.bfloat16, "cpu")
    pool = MLATokenToKVPool.from_buffers(kv=kv, page_size=4, index_translation=torch.arange(48) % 12)
    assert (pool.size, pool.index_size) == (12, 48)


mha, mla, mamba = MHATokenToKVPool.from_buffers, MLATokenToKVPool.from_buffers, MambaPool.from_buffers
dsa, paged, state = DSATokenToKVPool.from_buffers, DeepSeekV4PagedPool.from_buffers, DeepSeekV4StatePool.from_buffers


def zeros(*shape, dtype=torch.bfloat16):
    return [torch.zeros(shape, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mha(k=zeros(8, 2, 4), page_size=4), ValueError, "v is None"),
        (
            lambda: mha(k=zeros(8, 2, 4), v=zeros(8, 2, 4), kv=zeros(2, 8, 2, 4), page_size=4),
            ValueError,
            "kv is given together with k or v",
        ),
        (
            lambda: mha(kv=zeros(3, 8, 2, 4), page_size=4),
            ValueError,
            r"kv has shape \(3, 8, 2",
        ),
        (
            lambda: mha(kv=zeros(2, 8, 2, 4), page_size=4, form="head_major"),
            ValueError,
            "form is 'head_major'",
        ),
        (lambda: mha(k=zeros(8, 4), v=zeros(8, 4), page_size=4), ValueError, "2 dimensions"),
        (
            lambda: mha(k=zeros(8, 2, 4), v=zeros(12, 2, 4), page_size=4),
            ValueError,
            "v has slots 12; k has 8",
        ),
        (
            lambda: mha(k=zeros(8, 2, 4), v=zeros(8, 2, 4)[:1], page_size=4),
            ValueError,
            "v has layers 1; k has 2",
        ),
        (
            lambda: mha(k=zeros(8, 2, 4), v=zeros(8, 2, 4), page_size=0),
            ValueError,
            "page_size is 0",
        ),
        (
            lambda: mha(k=[t.mT for t in zeros(8, 4, 2)], v=zeros(8, 2, 4), page_size=4),
            ValueError,
            "must be dense",
        ),
        (lambda: mla(kv=torch.zeros(2, 8, 4), page_size=4), TypeError, r"kv\.unbind\(0\)"),
        (lambda: mla(kv=[], page_size=4), ValueError, "kv is empty"),
        (lambda: mla(kv=iter(zeros(8, 4)), page_size=4), TypeError, "kv is a list_iterator, which can be read once"),
        (
            lambda: mha(k=zeros(8, 2, 4), v=zeros(8, 2, 4), page_size=4, form="hnd"),
            ValueError,
            "form is 'hnd'; accepted are slot_major, block_major, head_major",
        ),
        (lambda: mla(kv=[torch.zeros(8, 4), None], page_size=4), TypeError, r"kv\[1\]"),
        (
            lambda: mla(kv=[torch.zeros(8, 4), torch.zeros(9, 4)], page_size=4),
            ValueError,
            r"kv\[1\] has shape \(9, 4\)",
        ),
        (
            lambda: mla(kv=[torch.zeros(8, 4), torch.zeros(8, 8)[:, :4]], page_size=4),
            ValueError,
            r"kv\[1\] has stride",
        ),
        (
            lambda: mla(kv=[torch.zeros(8, 4), torch.zeros(8, 4).half()], page_size=4),
            ValueError,
            r"kv\[1\] has dtype",
        ),
        (lambda: mla(kv=zeros(4, 4, 2, 8), page_size=4), ValueError, "kv has shape"),
        (
            lambda: mla(kv=zeros(8, 4), page_size=4, index_translation=torch.zeros(8)),
            ValueError,
            "index_translation has shape",
        ),
        (
            lambda: mamba(conv=zeros(4, 2), temporal=zeros(4, 2), page_size=4),
            ValueError,
            "page_size is 4",
        ),
        (
            lambda: mamba(conv=[zeros(4, 2), torch.zeros(4, 2)], temporal=zeros(4, 2)),
            TypeError,
            r"conv\[1\] is a tensor among sequences",
        ),
        (
            lambda: mamba(conv=torch.zeros(2, 4, 2), temporal=zeros(4, 2)),
            TypeError,
            "conv is one tensor",
        ),
        (
            lambda: dsa(kv=zeros(16, 4), index_k=zeros(3, 96), page_size=4),
            ValueError,
            "index_k has slots 12; kv has 16",
        ),
        (
            lambda: paged(kv=zeros(4, 4), compression_ratio=4, page_size=6),
            ValueError,
            "page_size is 6",
        ),
        (
            lambda: paged(kv=zeros(4, 4), compression_ratio=4, page_size=16, slots_per_row=6),
            ValueError,
            "slots_per_row is 6",
        ),
        (lambda: DeepSeekV4PagedPool(30, 8, 4, 16, 2), ValueError, "size is 30"),
        (lambda: state(state={}), ValueError, "state is empty"),
        (lambda: state(state=zeros(4, 2), page_size=2), ValueError, "page_size is 2"),
        (lambda: component_from_tensors("x", zeros(8, 2), BufferForm.HEAD_MAJOR), ValueError, "head-major"),
        (lambda: component_from_tensors("x", zeros(8), BufferForm.SLOT_MAJOR), ValueError, "x has shape"),
        (lambda: component_from_tensors("x", zeros(8, 2), slots_per_row=0), ValueError, "slots_per_row of x is 0"),
        (lambda: component_from_tensors("x", zeros(0, 2)), ValueError, "at least one element"),
        (
            lambda: mha(k=[torch.zeros(1, 2, 4).expand(8, 2, 4)], v=zeros(8, 2, 4)[:1], page_size=4),
            ValueError,
            "k has strides .* rows overlap",
        ),
        (
            lambda: component_from_tensors("x", [torch.zeros(64).as_strided((4, 3, 4), (8, 4, 1))], "block_major"),
            ValueError,
            "x has strides .* rows overlap",
        ),
        (
            lambda: component_from_tensors("x", [torch.zeros(64).as_strided((3, 4, 4), (8, 4, 1))], "head_major"),
            ValueError,
            "x has strides .* rows overlap",
        ),
        (
            lambda: mla(kv=zeros(8, 4), page_size=4, index_translation=[0] * 8),
            TypeError,
            "index_translation is a list",
        ),
        (lambda: mla(kv=zeros(8, 4), page_size=4.0), TypeError, "page_size is 4.0; it must be a whole number"),
        (
            lambda: DSATokenToKVPool(64, 0, torch.bfloat16, 16, 4, 2, index_head_dim=128),
            ValueError,
            "page_size is 0; it must be at least 1",
        ),
        (
            lambda: DSATokenToKVPool(64, 16, torch.bfloat16, 16, 4, 2, index_head_dim=64),
            ValueError,
            "index_head_dim is 64; it must be a multiple of quant_block_size 128",
        ),
        (
            lambda: dsa(kv=zeros(16, 4), index_k=zeros(4, 96), page_size=4, index_page_size=0),
            ValueError,
            "slots_per_row of index_k is 0",
        ),
        (
            lambda: mamba(conv=[zeros(4, 2, 0)], temporal=zeros(4, 2)),
            ValueError,
            r"conv\[0\]\[0\] has shape .* element",
        ),
        (lambda: mamba(conv=[]), ValueError, "components is empty"),
        (
            lambda: mamba(conv=zeros(4, 2), side={1: zeros(4, 2), "1": zeros(4, 3)}),
            ValueError,
            "names are unique within a pool",
        ),
        (lambda: DevicePool().describe([], 4), ValueError, "components is empty"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"])
@pytest.mark.parametrize("given", ["kv", "k and v"])
def test_blocks_of_heads_in_any_order_of_memory_are_read_by_slot_and_head(order: str, given: str) -> None:
    extents = {"L": 2, "B": 5, "H": 3, "N": 4, "C": 16}  # C: the values of a head after its keys
    whole = torch.randint(0, 1 << 15, [extents[axis] for axis in order], dtype=torch.int16).view(torch.bfloat16)
    views = whole.permute([order.index(axis) for axis in "LBHNC"]).unbind(0)
    if given == "kv":
        pool = MHATokenToKVPool.from_buffers(kv=views, page_size=4, form="block_head_major")
    else:
        k, v = ([t[..., half].transpose(1, 2) for t in views] for half in (slice(8), slice(8, 16)))
        pool = MHATokenToKVPool.from_buffers(k=k, v=v, page_size=4)
    assert (pool.size, pool.head_num, pool.head_dim, pool.v_head_dim) == (20, 3, 8, 8)
    host = MHATokenToKVPoolHost(pool, 1.0, 0)
    slots = (torch.randperm(5)[:, None] * 4 + torch.arange(4)).flatten()
    host.backup_from_device_all_layer(pool, slots, slots)
    by_slot = torch.stack([t.transpose(1, 2).flatten(0, 1) for t in views], 1).view(torch.int16)
    assert torch.equal(host.k_buffer.view(torch.int16), by_slot[..., :8])
    assert torch.equal(host.v_buffer.view(torch.int16), by_slot[..., 8:])
    before = whole.clone()
    whole.zero_()
    host.load_to_device_all_layer(pool, slots, slots)
    assert torch.equal(whole.view(torch.int16), before.view(torch.int16))


def test_blocks_of_heads_of_another_shape_are_refused() -> None:
    for shape in ((5, 3, 4, 15), (5, 3, 16), (2, 5, 4, 3, 16)):
        with pytest.raises(ValueError, match=r"^kv has shape .*block-head-major is \[blocks, heads, block, 2 \* dim\]"):
            MHATokenToKVPool.from_buffers(kv=[torch.zeros(shape)], page_size=4, form="block_head_major")
    with pytest.raises(ValueError, match=r"^k has shape .*block-head-major is \[blocks, heads, block, dim\]"):
        MHATokenToKVPool.from_buffers(
            k=[torch.zeros(4, 3, 8)], v=[torch.zeros(4, 3, 8)], page_size=4, form="block_head_major"
        )
    with pytest.raises(ValueError, match=r"form='block_head_major'"):
        MHATokenToKVPool.from_buffers(kv=[torch.zeros(5, 3, 4, 16)], page_size=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: MHATokenToKVPool(8, 4, torch.uint8, 1, 4, 1, **options),
        lambda **options: MambaPool(8, [(2,)], (2,), torch.uint8, torch.uint8, 1, **options),
        lambda **options: DSATokenToKVPool(8, 4, torch.uint8, 4, 0, 1, index_head_dim=128, **options),
        lambda **options: MHATokenToKVPoolHost(MHATokenToKVPool(8, 4, torch.uint8, 1, 4, 1), 1.0, 0, **options),
    ],
    ids=["mha", "mamba", "dsa", "host"],
)
def test_a_keyword_that_no_pool_has_is_refused(make: Callable[..., object]) -> None:
    make()
    with pytest.raises(TypeError, match="index_translations"):
        make(index_translations=None)
