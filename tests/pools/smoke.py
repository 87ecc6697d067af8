"""Smoke check of a fresh installation of hicache-pools: a pool writes pages back and loads them again."""

import torch

from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost

device_pool = MHATokenToKVPool(64, 16, torch.float16, head_num=2, head_dim=8, layer_num=3)
for buffer in device_pool.k_buffer + device_pool.v_buffer:
    buffer.copy_(torch.randn_like(buffer))
before = [buffer.clone() for buffer in device_pool.k_buffer + device_pool.v_buffer]
host_pool = MHATokenToKVPoolHost(device_pool, 2.0, 0, 16)
slots = torch.arange(64)
host = host_pool.alloc(64)
host_pool.backup_from_device_all_layer(device_pool, host, slots, "kernel")
for buffer in device_pool.k_buffer + device_pool.v_buffer:
    buffer.zero_()
for layer in range(3):
    host_pool.load_to_device_per_layer(device_pool, host, slots, layer, "kernel")
after = device_pool.k_buffer + device_pool.v_buffer
host_pool.destroy()
if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
    raise SystemExit("bytes differ after a round trip")
