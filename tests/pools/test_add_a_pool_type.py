"""The example of the README's section "Add a pool type" is short, runs as printed, and makes a member of a group."""

import re
from pathlib import Path

import pytest
import torch

from hicache_pools import HostPool, PoolSpec, build_host_pool_group

README = Path(__file__).parents[2] / "packages" / "hicache-pools" / "README.md"


@pytest.fixture(scope="module")
def source():
    section = README.read_text(encoding="utf-8").split("\n## Add a pool type\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return code


@pytest.fixture
def example(source):
    names = {"__name__": "example"}
    exec(compile(source, str(README), "exec"), names)
    return names


def test_the_example_is_under_60_lines(source):
    assert len(source.splitlines()) < 60


def test_the_example_brings_its_bytes_back(example):
    assert example["before"]
    assert all(torch.equal(b, a) for b, a in zip(example["before"], example["after"], strict=True))
    assert example["host_pool"].k_buffer.shape == (32, 3, 16, 4, 32)


def test_a_new_pool_type_has_every_layout_and_its_pages(example):
    device_pool, kind = example["device_pool"], example["QuantizedMHAPoolHost"]
    assert issubclass(kind, HostPool)
    for layout in ("layer_first", "page_first", "page_first_direct"):
        pool = kind(device_pool, 1.0, 0, 16, layout=layout)
        assert pool.page_bytes == 16 * 3 * 2 * (4 * 32 + 4)
        data = torch.randint(0, 256, (pool.page_bytes,), dtype=torch.uint8)
        pool.write_page(3, data)
        assert torch.equal(pool.read_page(3), data)
        pool.destroy()


def test_a_new_pool_type_joins_a_group(example):
    spec = PoolSpec(example["device_pool"], host_pool_type=example["QuantizedMHAPoolHost"])
    group = build_host_pool_group({"kv": spec}, page_size=16, host_to_device_ratio=2.0)
    assert type(group.get_pool("kv")) is example["QuantizedMHAPoolHost"]
    assert group.size == 512
    group.destroy()
