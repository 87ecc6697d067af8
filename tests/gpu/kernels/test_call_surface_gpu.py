"""The existing call surface between a GPU and pinned memory, bit-exact against plain torch."""

import pytest
import torch

from hicache_kernels import jit_kernel, jit_kernel_reference
from hicache_kernels.pointer_tables import pointer_table
from hicache_kernels.probe import unavailable_reason
from hicache_kernels.spec import module_device_type

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled(gpu: torch.device) -> torch.device:
    for module in ("main", "staged"):
        assert unavailable_reason(module, module_device_type(gpu)) is None
    return gpu


def random_bytes(*shape: int, device: torch.device | str, pinned: bool = False) -> torch.Tensor:
    made = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    return made.pin_memory() if pinned else made


def host_layers(layout: str, layers: int, slots: int, row: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    if layout == "layer_first":
        buffer = random_bytes(layers, slots, row, device="cpu", pinned=True)
        return buffer, [buffer[layer] for layer in range(layers)], row
    buffer = random_bytes(slots, layers, row, device="cpu", pinned=True)
    return buffer, [buffer[:, layer] for layer in range(layers)], layers * row


@pytest.mark.sanitizer
@pytest.mark.parametrize("row", [4, 20, 24, 48, 576, 2048, 16384])
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_one_layer_both_directions(gpu: torch.device, row: int, index_device: str) -> None:
    slots, n = 257, 129
    host = [random_bytes(slots, row, device="cpu", pinned=True) for _ in "kv"]
    device = [random_bytes(slots, row, device=gpu) for _ in "kv"]
    dst, src = (torch.randperm(slots)[:n] for _ in range(2))
    want = [rows.clone() for rows in device]
    for to, of in zip(want, host, strict=True):
        to[dst.to(gpu)] = of[src].to(gpu)
    jit_kernel.transfer_hicache_one_layer(*device, dst.to(index_device), *host, src.int().to(index_device))
    assert all(torch.equal(a, b) for a, b in zip(device, want, strict=True))
    back = [rows.clone() for rows in host]
    for to, of in zip(back, device, strict=True):
        to[src] = of[dst.to(gpu)].cpu()
    jit_kernel.transfer_hicache_one_layer(*host, src.to(index_device), *device, dst.to(index_device), block_quota=2)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(host, back, strict=True))


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize(("row", "layers"), [(20, 3), (576, 61), (2048, 32)])
def test_all_layers_both_directions_follow_tables(gpu: torch.device, layout: str, row: int, layers: int) -> None:
    slots, n = 96, 64
    hosts = [host_layers(layout, layers, slots, row) for _ in "kv"]
    device = [[random_bytes(slots, row, device=gpu) for _ in range(layers)] for _ in "kv"]
    dst, src = (torch.randperm(slots)[:n].to(gpu) for _ in range(2))
    stride = hosts[0][2]
    wanted = [buffer.clone() for buffer, _, _ in hosts]
    for buffer, layer_rows in zip(wanted, device, strict=True):
        for layer, rows in enumerate(layer_rows):
            target = buffer[layer] if layout == "layer_first" else buffer[:, layer]
            target[dst.cpu()] = rows[src].cpu()
    host_tables = [pointer_table(views, device=gpu) for _, views, _ in hosts]
    device_tables = [pointer_table(rows) for rows in device]
    jit_kernel.transfer_hicache_all_layer(
        *host_tables,
        dst,
        *device_tables,
        src,
        kv_cache_src_stride_bytes=row,
        kv_cache_dst_stride_bytes=stride,
        element_size=row,
    )
    torch.cuda.synchronize()
    assert all(torch.equal(buffer, want) for (buffer, _, _), want in zip(hosts, wanted, strict=True))
    for rows in device[0] + device[1]:
        rows.zero_()
    # Foreign tables: the same addresses, without memory of their tensors.
    jit_kernel.transfer_hicache_all_layer(
        *(table.clone() for table in device_tables),
        src,
        *(table.clone() for table in host_tables),
        dst,
        kv_cache_src_stride_bytes=stride,
        kv_cache_dst_stride_bytes=row,
        element_size=row,
        block_quota=4,
    )
    for buffer, layer_rows in zip(wanted, device, strict=True):
        for layer, rows in enumerate(layer_rows):
            source = buffer[layer] if layout == "layer_first" else buffer[:, layer]
            assert torch.equal(rows[src].cpu(), source[dst.cpu()])


@pytest.mark.sanitizer
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("pages", "page_size", "staging_pages"),
    [(1, 1, 64), (63, 16, 64), (65, 16, 64), (129, 1, 64), (129, 16, 63), (5, 16, 1)],
)
def test_staged_pages_land_exactly(
    gpu: torch.device, pages: int, page_size: int, staging_pages: int, interleaved: bool
) -> None:
    layers, row, total = 6, 256, pages + 5
    slots = total * page_size
    if interleaved:
        joint = random_bytes(slots, layers, 2, row, device="cpu", pinned=True)
        hosts = [joint[:, :, 0], joint[:, :, 1]]
    else:
        hosts = [random_bytes(slots, layers, row, device="cpu", pinned=True) for _ in "kv"]
    device = [[random_bytes(slots, row, device=gpu) for _ in range(layers)] for _ in "kv"]
    inside = torch.arange(page_size)
    src, dst = ((torch.randperm(total)[:pages, None] * page_size + inside).reshape(-1) for _ in range(2))
    tables = [pointer_table(rows) for rows in device]
    staging = [torch.empty(staging_pages * page_size, layers, row, dtype=torch.uint8, device=gpu) for _ in "kv"]
    wanted = [host.clone() for host in hosts]
    jit_kernel_reference.transfer_hicache_all_layer_staged_lf_pf(
        *tables, src, dst, *(torch.empty_like(buffer) for buffer in staging), *wanted, page_size=page_size
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # the second call finds the staging memory of the first in use
            jit_kernel.transfer_hicache_all_layer_staged_lf_pf(
                *tables, src.to(gpu), dst, *staging, *hosts, page_size=page_size
            )
    stream.synchronize()
    assert all(torch.equal(host, want) for host, want in zip(hosts, wanted, strict=True))
    mla = random_bytes(slots, layers, row, device="cpu", pinned=True)
    want = mla.clone()
    for layer, rows in enumerate(device[0]):
        want[dst, layer] = rows[src.to(gpu)].cpu()
    jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf(tables[0], src, dst, staging[0], mla, page_size=page_size)
    torch.cuda.synchronize()
    assert torch.equal(mla, want)


def test_memory_that_is_not_pinned_is_named(gpu: torch.device) -> None:
    device, host = random_bytes(8, 64, device=gpu), random_bytes(8, 64, device="cpu")
    index = torch.arange(8)
    with pytest.raises(ValueError, match="cache_src is CPU memory that is not pinned"):
        jit_kernel.transfer_hicache_one_layer_mla(device, index, host, index)


def test_device_indices_are_checked_when_asked(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_CHECK", "1")
    device, host = random_bytes(8, 64, device=gpu), random_bytes(8, 64, device="cpu", pinned=True)
    good, bad = torch.arange(8, device=gpu), torch.arange(1, 9, device=gpu)
    with pytest.raises(IndexError, match="indices_src contains 8"):
        jit_kernel.transfer_hicache_one_layer_mla(device, good, host, bad)


def test_a_row_copy_is_captured_in_a_graph(gpu: torch.device) -> None:
    host = random_bytes(64, 256, device="cpu", pinned=True)
    device = torch.zeros(64, 256, dtype=torch.uint8, device=gpu)
    src, dst = (torch.randperm(64, device=gpu) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jit_kernel.transfer_hicache_one_layer_mla(device, dst, host, src)
    assert not device.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(device[dst].cpu(), host[src.cpu()])


def test_rows_on_one_device_are_copied_too(gpu: torch.device) -> None:
    a, b = (random_bytes(33, 48, device=gpu) for _ in range(2))
    src, dst = (torch.randperm(33, device=gpu) for _ in range(2))
    jit_kernel.transfer_hicache_one_layer_mla(b, dst, a, src)
    assert torch.equal(b[dst], a[src])
