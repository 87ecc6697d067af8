"""The existing call surface under odd calls: every shape of pages around a 64-page ring, and every refusal by name."""

import random
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_kernels import jit_kernel, jit_kernel_reference, row_copy
from hicache_kernels.pointer_tables import pointer_table, remembered_layers
from hicache_kernels.probe import unavailable_reason

WAYS = pytest.mark.parametrize("calls", [jit_kernel, jit_kernel_reference], ids=["compiled", "torch"])


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def slots_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    size=st.sampled_from([4, 8, 12, 16, 48, 128, 576, 1152, 4096, 16384]),
    layers=st.integers(1, 128),
    pages=st.sampled_from([0, 1, 2, 63, 64, 65]),
    page_size=st.sampled_from([1, 2, 16, 64, 256]),
    data=st.data(),
)
def test_all_layer_copies_rows_of_every_size_and_leaves_the_rest(size, layers, pages, page_size, data):
    while size * layers * (pages + 1) * page_size > 8 << 20:
        layers, page_size = max(1, layers // 2), max(1, page_size // 2)
    total = (pages + 1) * page_size
    gap = data.draw(st.sampled_from([0, 4, 16]))
    host = random_bytes(total, layers, size + gap)
    device = random_bytes(layers, total, size + gap)
    tables = pointer_table([host[:, layer] for layer in range(layers)]), pointer_table(list(device))
    strides = (size + gap) * layers, size + gap
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    indices = [slots_of(torch.randperm(pages + 1)[:pages], page_size).to(dtype) for _ in range(2)]
    to_host = data.draw(st.booleans())
    first, second = (0, 1) if to_host else (1, 0)
    want_host, want_device = host.clone(), device.clone()
    if to_host:
        want_host[indices[0].long(), :, :size] = device[:, indices[1].long(), :size].transpose(0, 1)
    else:
        want_device[:, indices[1].long(), :size] = host[indices[0].long(), :, :size].transpose(0, 1)
    jit_kernel.transfer_hicache_all_layer_mla(
        tables[first],
        indices[first],
        tables[second],
        indices[second],
        cache_dst_stride_bytes=strides[first],
        cache_src_stride_bytes=strides[second],
        element_size=size,
        page_size=page_size,
    )
    assert torch.equal(host, want_host)
    assert torch.equal(device, want_device)


@WAYS
@pytest.mark.parametrize("pages", [1, 63, 64, 65, 127, 128, 129])
def test_staging_for_64_pages_takes_any_number_of_them(calls, pages):
    page_size, layers, size = random.choice([1, 2, 16]), random.choice([1, 3]), random.choice([16, 48])
    total = (pages + 2) * page_size
    src = [random_bytes(total, size) for _ in range(layers)]
    dst = random_bytes(total, layers + 1, size)  # one layer more: guard bytes after every slot
    before = dst.clone()
    indices = [slots_of(torch.randperm(pages + 2)[:pages], page_size) for _ in range(2)]
    before[indices[1], :layers] = torch.stack(src, 1)[indices[0]]
    calls.transfer_hicache_all_layer_mla_staged_lf_pf(
        pointer_table(src),
        indices[0],
        indices[1],
        random_bytes(64 * page_size, layers, size),
        dst[:, :layers],
        page_size=page_size,
    )
    assert torch.equal(dst, before)


@pytest.mark.parametrize("destinations", [[0, 1, 2], [5, 3, 4]])
@WAYS
def test_guard_bytes_around_staged_pages_stay(calls, destinations):
    src = [random_bytes(32, 32) for _ in range(3)]
    whole = random_bytes(7 * 4 + 2, 5, 64)
    dst = whole[1:-1, 1:4, 16:48]
    want = whole.clone()
    slots, sources = slots_of(torch.tensor(destinations), 4), slots_of(torch.tensor([6, 0, 3]), 4)
    want[1:-1, 1:4, 16:48][slots] = torch.stack(src, 1)[sources]
    calls.transfer_hicache_all_layer_mla_staged_lf_pf(
        pointer_table(src), sources, slots, random_bytes(8, 3, 32), dst, page_size=4
    )
    assert torch.equal(whole, want)


def test_staging_memory_that_kernels_cannot_address_is_refused():
    if unavailable_reason("staged", "cpu") is not None:
        pytest.skip("plain torch copies from any address")
    src, slots = [random_bytes(8, 16) for _ in range(2)], slots_of(torch.tensor([1, 0]), 4)
    staging = random_bytes(8 * 2 * 16 + 2)[2:].view(8, 2, 16)
    with pytest.raises(ValueError, match=r"staging memory for ptr_src starts at 0x.*multiple of 4 bytes"):
        jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf(
            pointer_table(src), slots, slots, staging, random_bytes(8, 2, 16), page_size=4
        )


def one_layer(**changes):
    arguments = {"cache_dst": random_bytes(8, 16), "cache_src": random_bytes(8, 16)}
    arguments |= {"indices_dst": torch.arange(4), "indices_src": torch.arange(4)}
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        jit_kernel.transfer_hicache_one_layer_mla(**(arguments | changes))
    return str(caught.value)


@pytest.mark.parametrize("name", ["cache_dst", "cache_src"])
def test_caches_whose_rows_share_bytes_are_refused(name):
    assert f"{name} has rows 0 bytes apart" in one_layer(**{name: random_bytes(1, 16).expand(8, 16)})
    assert f"{name} has rows 8 bytes apart" in one_layer(**{name: random_bytes(300).as_strided((8, 16), (8, 1))})
    assert f"{name} is a NoneType" in one_layer(**{name: None})


@pytest.mark.parametrize("name", ["indices_dst", "indices_src"])
def test_indices_of_no_kind_are_refused(name):
    assert f"{name} is a NoneType" in one_layer(**{name: None})
    assert f"{name} is a list" in one_layer(**{name: [0, 1, 2, 3]})
    assert f"{name} contains {2**63 - 1}" in one_layer(**{name: torch.tensor([0, 1, 2, 2**63 - 1])})
    assert "page_size is 0" in one_layer(page_size=0)
    assert "page_size is -4" in one_layer(page_size=-4)


@pytest.mark.parametrize("name", ["dst", "src"])
def test_tables_with_impossible_strides_are_refused(name):
    tables = {f"ptr_{side}": pointer_table([random_bytes(8, 16) for _ in range(3)]) for side in ("dst", "src")}
    indices = {f"indices_{side}": torch.arange(4) for side in ("dst", "src")}
    strides = {"cache_dst_stride_bytes": 16, "cache_src_stride_bytes": 16, "element_size": 16}

    def refusal(**changes):
        with pytest.raises((TypeError, ValueError, IndexError)) as caught:
            jit_kernel.transfer_hicache_all_layer_mla(**(tables | indices | strides | changes))
        return str(caught.value)

    assert f"ptr_{name} has rows 8 bytes apart" in refusal(**{f"cache_{name}_stride_bytes": 8})
    assert "stride is 0" in refusal(**{f"cache_{name}_stride_bytes": 0})
    assert "stride is -16" in refusal(**{f"cache_{name}_stride_bytes": -16})
    assert "element_size is -16" in refusal(element_size=-16)
    assert f"ptr_{name} is a NoneType" in refusal(**{f"ptr_{name}": None})
    foreign = torch.tensor([random_bytes(8, 16).data_ptr()] * 3)
    wide = torch.tensor([0, 1, 2, 2**32])
    assert f"indices_{name} contains {2**32}; rows of ptr_{name} are from 0 to {2**31 - 1}" in refusal(
        **{f"ptr_{name}": foreign, f"indices_{name}": wide}
    )


def test_a_table_repeated_by_a_view_names_the_layer_it_repeats():
    tensors = [random_bytes(4, 16) for _ in range(3)]
    repeated = pointer_table(tensors)[1:2].expand(3)
    found = remembered_layers("table", repeated)
    assert found is not None
    assert [tensor.data_ptr() for tensor in found.tensors] == repeated.tolist()


@pytest.mark.parametrize("size", [0, -4, 3, 6, 16384 + 2, None, 16.0, "16", [16]])
def test_probes_say_no_and_never_raise(size):
    assert not jit_kernel.can_use_hicache_jit_kernel(element_size=size)
    assert not jit_kernel.can_use_write_back_jit_kernel(element_size=size)


def test_tensors_on_the_cpu_are_refused_under_capture(monkeypatch):
    gpu, tensors = torch.device("cuda", 0), {"indices_dst": torch.arange(4)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    row_copy._check_capture(gpu, tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    row_copy._check_capture(gpu, {"ptr_src": None})
    row_copy._check_capture(torch.device("cpu"), tensors)
    with pytest.raises(ValueError, match="indices_dst is on the CPU; under graph capture it must be on cuda:0"):
        row_copy._check_capture(gpu, tensors)


def test_threads_call_at_once_without_mixing_rows():
    failures = []

    def work():
        src = [random_bytes(64, 48) for _ in range(4)]
        for _ in range(20):
            dst = random_bytes(64, 4, 48)
            indices = torch.randperm(64)
            jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf(
                pointer_table(src), indices, indices.flip(0), random_bytes(8, 4, 48), dst, page_size=1
            )
            if not torch.equal(dst[indices.flip(0)], torch.stack(src, 1)[indices]):
                failures.append(indices)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
