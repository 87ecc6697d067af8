"""Pools of random bytes for the transfer tests, on any device, and the oracle that checks every byte of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_kernels import DeviceRows, HostLayout, HostRows, HostStrides, Plane, host_bytes, host_strides, reference

DEVICE_FORMS = ("slot_major", "strided", "block_major", "joint_blocks", "head_major")


def random_bytes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, device=device)


def device_rows(
    form: str, slots: int, page_size: int, element: int, layers: int, device: torch.device
) -> tuple[DeviceRows, int, list[torch.Tensor]]:
    """Rows of one component, the bytes of a row, and the tensors whose bytes a test compares (gaps included)."""
    if form == "strided":
        whole = [random_bytes((slots, element + 32), device) for _ in range(layers)]
        return DeviceRows.slot_major([t[:, 16 : 16 + element] for t in whole]), element, whole
    if form == "block_major":
        whole = [random_bytes((slots // page_size, page_size, element), device) for _ in range(layers)]
        return DeviceRows.block_major(whole), element, whole
    if form == "joint_blocks":
        whole = [random_bytes((slots // page_size, 2, page_size, element), device) for _ in range(layers)]
        return DeviceRows.block_major([t[:, 1] for t in whole]), element, whole
    if form == "head_major":
        heads = next(h for h in (4, 2, 1) if element % (16 * h) == 0 or h == 1)
        whole = [random_bytes((heads, slots, element // heads), device) for _ in range(layers)]
        return DeviceRows.head_major(whole), element // heads, whole
    whole = [random_bytes((slots, element), device) for _ in range(layers)]
    return DeviceRows.slot_major(whole), element, whole


@dataclass
class RandomPool:
    planes: list[Plane]
    host: list[torch.Tensor]
    rows: list[torch.Tensor]
    pages: int
    page_size: int

    def slots(self, pages: torch.Tensor | Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        pages = torch.as_tensor(pages, dtype=dtype)
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, dtype=dtype)).flatten()

    def check_write_back(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        call: Callable[..., object],
        wait: Callable[[], object],
        **options: object,
    ) -> None:
        """``call(host, device, **options)`` leaves host bytes, gaps too, as the reference does, and changes no row."""
        for buffer in self.host:
            buffer.random_(0, 256)
        before, rows = [b.clone() for b in self.host], [t.clone() for t in self.rows]
        reference.write_back(self.planes, host, device)
        expected = [b.clone() for b in self.host]
        for buffer, old in zip(self.host, before, strict=True):
            buffer.copy_(old)
        call(host, device, **options)
        wait()
        assert all(torch.equal(a, b) for a, b in zip(self.host, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(self.rows, rows, strict=True))

    def check_load(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        call: Callable[..., object],
        wait: Callable[[], object],
        *,
        layer: int | None = None,
        **options: object,
    ) -> None:
        """``call(host, device, layer=layer, **options)`` leaves device bytes, gaps too, as the reference does."""
        for buffer in self.host:
            buffer.random_(0, 256)
        old_host, before = [b.clone() for b in self.host], [t.clone() for t in self.rows]
        reference.load(self.planes, host, device, layer)
        expected = [t.clone() for t in self.rows]
        for tensor, old in zip(self.rows, before, strict=True):
            tensor.copy_(old)
        call(host, device, layer=layer, **options)
        wait()
        assert all(torch.equal(a, b) for a, b in zip(self.rows, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(self.host, old_host, strict=True))


def random_pool(
    layout: HostLayout | str = HostLayout.PAGE_FIRST,
    elements: Sequence[int] = (64, 64),
    *,
    layers: int = 3,
    pages: int = 8,
    page_size: int = 4,
    form: str = "slot_major",
    gap: int = 0,
    separate: bool = False,
    device: torch.device | str = "cpu",
) -> RandomPool:
    """A pool with one page more on the device than on the host.

    ``gap`` bytes follow every host page; ``separate`` gives each plane a buffer of its own.
    """
    device = torch.device(device)
    pinned = device.type == "cuda"
    sizes = {"layers": layers, "pages": pages, "page_size": page_size}

    def widen(strides: HostStrides) -> HostStrides:
        return HostStrides(strides.offset, strides.page + gap, strides.layer + gap_layer, strides.slot)

    gap_layer = gap * pages if layout == HostLayout.LAYER_FIRST else 0

    def host_buffer(sizes_: Sequence[int]) -> torch.Tensor:
        extra = gap * pages * (layers * len(sizes_) if layout == HostLayout.LAYER_FIRST else 1)
        size = host_bytes(sizes_, **sizes) + extra
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    planes, rows, host = [], [], []
    if separate:
        placed = [(host_buffer([e]), widen(host_strides(layout, [e], **sizes)[0])) for e in elements]
    else:
        shared = host_buffer(elements)
        strides = [widen(s) for s in host_strides(layout, elements, **sizes)]
        if layout == HostLayout.LAYER_FIRST:
            strides = [
                HostStrides(s.offset + i * layers * gap_layer, s.page, s.layer, s.slot) for i, s in enumerate(strides)
            ]
        placed = [(shared, s) for s in strides]
    for index, (element, (buffer, strides_)) in enumerate(zip(elements, placed, strict=True)):
        on_device, row_bytes, tensors = device_rows(form, (pages + 1) * page_size, page_size, element, layers, device)
        planes.append(Plane(f"component{index}", row_bytes, on_device, HostRows(buffer, strides_, pages, page_size)))
        rows += tensors
        if not any(buffer is b for b in host):
            host.append(buffer)
    return RandomPool(planes, host, rows, pages, page_size)


def random_pages(pages: int, count: int, *, runs: bool) -> torch.Tensor:
    """``count`` different pages: scattered, or in runs."""
    if not runs:
        return torch.randperm(pages)[:count]
    order: list[int] = []
    start = random.randrange(pages)
    while len(order) < count:
        length = random.randint(1, 7)
        order += [(start + i) % pages for i in range(min(length, count - len(order)))]
        start = (start + length) % pages
    return torch.tensor(order)


def random_shape() -> dict[str, Any]:
    """Arguments of :func:`random_pool` for a pool of any shape, up to 64 MiB."""
    shape: dict[str, Any] = {
        "layout": random.choice(list(HostLayout)),
        "elements": random.choices([4, 16, 48, 256, 576, 1152, 4096, 16384], k=random.randint(1, 3)),
        "pages": random.choice([1, 63, 64, 65, 127, 128, 129]),
        "page_size": random.choice([1, 2, 16, 64, 256]),
        "form": random.choice(DEVICE_FORMS),
        "gap": random.choice([0, 0, 16, 4]),
        "separate": random.random() < 0.3,
    }
    layer_bytes = sum(shape["elements"]) * shape["pages"] * shape["page_size"]
    while layer_bytes > 64 << 20:
        shape["page_size"] = max(1, shape["page_size"] // 4)
        shape["elements"] = [min(element, 4096) for element in shape["elements"]]
        layer_bytes = sum(shape["elements"]) * shape["pages"] * shape["page_size"]
    shape["layers"] = random.randint(1, max(1, min(128, (64 << 20) // layer_bytes)))
    return shape
