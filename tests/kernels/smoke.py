"""Smoke check of a fresh installation of hicache-kernels alone: one round trip, bit for bit."""

import torch

from hicache_kernels import DeviceRows, HostLayout, HostRows, Plane, PlaneTransfer, host_bytes, host_strides

layers, pages, page_size, row_bytes = 3, 5, 4, 32
sizes = {"layers": layers, "pages": pages, "page_size": page_size}
for layout in HostLayout:
    device = [torch.randint(256, (pages * page_size, row_bytes), dtype=torch.uint8) for _ in range(layers)]
    before = [layer.clone() for layer in device]
    buffer = torch.zeros(host_bytes([row_bytes], **sizes), dtype=torch.uint8)
    (strides,) = host_strides(layout, [row_bytes], **sizes)
    rows = HostRows(buffer, strides, pages, page_size)
    transfer = PlaneTransfer([Plane("kv", row_bytes, DeviceRows.slot_major(device), rows)])
    slots = torch.arange(pages * page_size)
    transfer.write_back(slots.flip(0).view(pages, page_size).flip(1).reshape(-1), slots)
    for layer in device:
        layer.zero_()
    transfer.load(slots.flip(0).view(pages, page_size).flip(1).reshape(-1), slots)
    if not all(torch.equal(a, b) for a, b in zip(before, device, strict=True)):
        raise SystemExit(f"{layout}: bytes differ after a round trip")
