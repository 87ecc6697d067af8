"""NUMA placement: reading sysfs, and the mask handed to the kernel."""

import ctypes
import errno
import mmap
import random
from pathlib import Path

import numpy as np
import pytest

from hicache_pools.host_memory import allocate_host_buffer
from hicache_pools.numa import numa_node_of, prefer_node

ADDRESS = "0000:9a:00.0"


def sysfs(root: Path, text: str) -> Path:
    device = root / "bus" / "pci" / "devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)
    return root


def test_the_node_is_read_from_the_devices_directory(tmp_path: Path) -> None:
    node = random.randrange(16)
    assert numa_node_of(ADDRESS, sysfs_root=sysfs(tmp_path, f"{node}\n")) == node


def test_an_address_in_capitals_is_the_same_device(tmp_path: Path) -> None:
    assert numa_node_of(ADDRESS.upper(), sysfs_root=sysfs(tmp_path, "1\n")) == 1


@pytest.mark.parametrize("text", ["-1\n", "", "none\n"])
def test_a_node_that_sysfs_does_not_tell_is_none(tmp_path: Path, text: str) -> None:
    assert numa_node_of(ADDRESS, sysfs_root=sysfs(tmp_path, text)) is None


def test_a_device_that_sysfs_does_not_have_is_none(tmp_path: Path) -> None:
    assert numa_node_of(ADDRESS, sysfs_root=tmp_path) is None


@pytest.mark.parametrize("node", [0, 1, 63, 64, 200])
def test_the_mask_has_the_nodes_bit_and_the_kernel_may_read_it(node: int) -> None:
    calls = []

    def mbind(address: int, nbytes: int, mode: int, mask: "ctypes.Array[ctypes.c_ulong]", bits: int) -> int:
        calls.append((address, nbytes, mode, sum(int(word) << 64 * i for i, word in enumerate(mask)), bits))
        return 0

    assert prefer_node(4096, 8192, node, mbind=mbind) is None
    [(address, nbytes, mode, mask, bits)] = calls
    assert (address, nbytes, mode, mask) == (4096, 8192, 1, 1 << node)
    assert node < bits - 1  # the kernel looks at bits - 1 of them


def test_a_refusal_is_reported_and_not_raised() -> None:
    assert "Operation not permitted" in str(prefer_node(4096, 4096, 3, mbind=lambda *_: errno.EPERM))


def test_a_negative_node_is_an_error() -> None:
    with pytest.raises(ValueError, match="-2"):
        prefer_node(4096, 4096, -2)


def test_the_real_call_either_works_or_says_why() -> None:
    mapping = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    refusal = prefer_node(address, 1 << 20, 0)
    assert refusal is None or refusal.startswith("mbind to NUMA node 0 failed: ")


def test_a_buffer_whose_node_does_not_exist_stays_where_the_kernel_puts_it() -> None:
    with allocate_host_buffer(1 << 20, pin=False, page_bytes=4096, numa_node=1000) as buffer:
        assert buffer.numa_node is None
        buffer.tensor.fill_(7)
