"""Settings of the storage backend for SGLang, the JSON for its command line, and that none of it needs SGLang."""

import json
import subprocess
import sys

import pytest
import torch

from hicache_controller.integrations.sglang import SglangSettings, storage_backend_config
from hicache_controller.integrations.sglang.pages import FlatPages, HostPages
from hicache_controller.storage import MemoryStorage


def test_the_configuration_holds_what_was_set_and_comes_back_as_settings():
    settings = SglangSettings("file:///mnt/l3", {"capacity_bytes": 10**12}, revision="1")
    config = json.loads(json.dumps(storage_backend_config(settings)))
    assert config == {
        "backend_name": "hicache",
        "module_path": "hicache_controller.integrations.sglang",
        "class_name": "HiCacheBackend",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "storage": "file:///mnt/l3",
        "storage_options": {"capacity_bytes": 10**12},
        "revision": "1",
    }
    assert SglangSettings.of(config) == settings


def test_keys_that_sglang_reads_itself_are_passed_on():
    SglangSettings.of({"storage": "memory", "prefetch_threshold": 64, "tp_lcm_size": 8, "interface_v1": 0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "has no storage"),
        ({"storage": ""}, "storage is ''"),
        ({"storage": None}, "storage is None; accepted is a text$"),
        ({"storage": "s3://bucket"}, "storage is 's3://bucket'"),
        ({"storage": "memory", "revision": 1}, "revision is 1; accepted is a text, or nothing"),
        ({"storage": "memory", "weights_hash": ""}, "weights_hash is ''"),
        ({"storage": "memory", "storage_options": "a"}, "storage_options is 'a'"),
        ({"storage": "memory", "directory": "/l3"}, "has directory; accepted are storage, "),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SglangSettings.of(wrong)


def test_settings_and_pages_need_no_sglang():
    program = "import sys, hicache_controller.integrations.sglang.pages; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


class TwoParts:
    """A host pool of pages in two parts, or one that cannot name their memory."""

    page_size, size, layout, dtype, layer_num, storage_format_tag = 2, 8, "page_first", torch.float16, 1, None

    def __init__(self) -> None:
        self.parts = torch.arange(64, dtype=torch.uint8).reshape(2, 4, 8)

    def get_page_buffer_meta(self, indices):
        page = int(indices[0]) // self.page_size
        return [self.parts[part, page].data_ptr() for part in (0, 1)], [8, 8]

    def get_dummy_flat_data_page(self):
        return torch.zeros(8, dtype=torch.float16)


def test_a_page_is_its_parts_where_they_lie():
    pool = TwoParts()
    pages = HostPages(pool)
    assert (pages.page_num, pages.page_bytes, pages.geometry.parts) == (4, 16, (8, 8))
    first, second = pages.page_memory(2)
    assert bytes(first) == bytes(range(16, 24))
    second[:] = bytes(8)
    assert not pool.parts[1, 2].any()
    assert HostPages(pool, has_bytes=False).page_memory(2) == ()


def test_flat_pages_are_stored_in_turns_of_the_buffer():
    storage, pool = MemoryStorage(), TwoParts()
    pages = FlatPages(pool, storage)
    keys = [bytes([number]) for number in range(150)]
    values = [torch.full((8,), number, dtype=torch.float16) for number in range(150)]
    assert pages.store(keys, values) == [True] * 150
    targets = [torch.zeros(2, 4, dtype=torch.float16) for _ in keys]
    assert pages.load([*keys, b"other"], [*targets, torch.zeros(8, dtype=torch.float16)])[-1] is None
    assert all(torch.equal(target.reshape(-1), value) for target, value in zip(targets, values, strict=True))
    with pytest.raises(ValueError, match="the tensor has 6 bytes; a page has 16"):
        pages.load(keys[:1], [torch.zeros(3, dtype=torch.float16)])
