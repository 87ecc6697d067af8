"""The device code itself, compiled for the CPU, its threads run one after the other: the same arithmetic, no GPU."""

import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import tvm_ffi
from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

from hicache_kernels import HostLayout, Plan, PlaneTransfer, movers, paths, planner
from hicache_kernels.spec import CSRC
from hicache_kernels.staging import StagingRing

EMULATED = Path(__file__).parent / "emulated"
ELEMENTS = [(64, 128, 64), (512,), (1152,), (2048, 512), (16,), (576, 48), (20,), (8, 24)]


def now() -> None:
    """Emulated work is done when the call returns."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no g++")
    directory = tmp_path_factory.mktemp("emulated")
    # The stand-ins come first, and then every other header, copied so that a quoted include finds it too.
    include = directory / "include" / "hicache"
    shutil.copytree(CSRC / "include" / "hicache", include)
    for header in (EMULATED / "hicache").iterdir():
        shutil.copy(header, include / header.name)

    def build(name):
        library = directory / f"{name}.so"
        found = [find_include_path(), find_dlpack_include_path()]
        command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{directory / 'include'}"]
        command += [*(f"-I{path}" for path in found), "-x", "c++", str(CSRC / name / f"{name}.cu")]
        command += [f"-L{Path(find_libtvm_ffi()).parent}", "-ltvm_ffi", "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return tvm_ffi.load_module(str(library))

    with ThreadPoolExecutor() as pool:
        return dict(zip(("main", "staged"), pool.map(build, ("main", "staged")), strict=True))


@pytest.fixture
def emulated_transfers(emulated, monkeypatch):
    monkeypatch.setattr(paths, "load_module", lambda name, device_type: emulated[name])
    monkeypatch.setattr(paths, "unavailable_reason", lambda name, device_type: None)
    monkeypatch.setattr(movers, "DIRECT_THREADS", 64)
    monkeypatch.setattr(movers, "STAGED_THREADS", 32)


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize(
    ("policy", "elements"),
    [("direct", e) for e in ELEMENTS] + [("staged", e) for e in ELEMENTS if all(size % 16 == 0 for size in e)],
)
def test_kernels_move_every_row_to_its_place(pools, emulated_transfers, layout, elements, policy):
    form = random.choice(pools.DEVICE_FORMS)
    page_size, pages = random.choice([1, 4, 16]), random.choice([3, 17])
    pool = pools.random_pool(layout, elements, pages=pages, page_size=page_size, form=form)
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=7), policy=policy)
    count, dtype = random.randint(1, pages), random.choice([torch.int32, torch.int64])
    host = pool.slots(pools.random_pages(pages, count, runs=True), dtype)
    device = pool.slots(torch.randperm(pages + 1)[:count], dtype)
    pool.check_write_back(host, device, transfer_.write_back, now, block_quota=3)
    pool.check_load(host, device, transfer_.load, now, block_quota=3)
    pool.check_load(host, device, transfer_.load, now, layer=random.randrange(3), block_quota=3)


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("elements", [(64, 128, 64), (16,), (20,), (2048, 48)])
def test_one_kernel_loads_several_layers_and_counts_its_warps_out_of_each(pools, emulated, layout, elements):
    pool = pools.random_pool(layout, elements, layers=5, pages=6, page_size=2, form=random.choice(pools.DEVICE_FORMS))
    mover = movers.DirectMover(pool.planes, emulated["main"])
    dtype = random.choice([torch.int32, torch.int64])
    host, device = pool.slots(torch.randperm(6), dtype), pool.slots(torch.randperm(7)[:6], dtype)

    def load(host, device, first, count):
        done, events = torch.full((count,), 9, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
        queued = mover.load_layers(
            host, device, first_layer=first, done=done, events=events, blocks=3, stream=0, side_stream=0
        )
        assert int(done.min()) == int(done.max())
        assert bool(done[0]) is queued
        return queued

    def call(host, device, *, layer):
        assert load(host, device, layer or 0, 5 if layer is None else 1)

    if load(host, device, 0, 5):
        pool.check_load(host, device, call, now)
        pool.check_load(host, device, call, now, layer=3)
    else:
        assert len(set(elements)) > 1  # rows of different vector widths take a kernel each


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("most", [2, 4, 16])
@pytest.mark.parametrize("layers", [2, 5, 13])
def test_copies_of_several_layers_fill_every_row(pools, emulated_transfers, layout, most, layers):
    pool = pools.random_pool(layout, random.choice([(64, 128), (512,)]), layers=layers, pages=9, page_size=2)
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=random.choice([2, 64])), policy="staged")
    host, device = pool.slots(pools.random_pages(9, 7, runs=True)), pool.slots(torch.randperm(10)[:7])
    mover = transfer_._paths.staged

    def load(host, device, *, layer):
        assert layer is None
        mover.load(host[::2] // 2, device, None, first_layer=0, end_layer=layers, layers_each=most)

    pool.check_load(host, device, load, now)


@pytest.mark.parametrize("layout", list(HostLayout))
def test_wide_rows_of_short_runs_and_runs_on_both_sides(pools, emulated_transfers, monkeypatch, layout):
    pool = pools.random_pool(layout, (16384, 16384), layers=2, pages=9)
    transfer_ = PlaneTransfer(pool.planes, policy="staged")
    for host, device in (([1, 2, 3, 7, 8], [4, 0, 9, 8, 2]), ([1, 2, 3, 7, 8], [1, 2, 3, 4, 5])):
        pool.check_write_back(pool.slots(host), pool.slots(device), transfer_.write_back, now)
        pool.check_load(pool.slots(host), pool.slots(device), transfer_.load, now)
        monkeypatch.setattr(movers, "MIN_COPY_BYTES", 1)
        monkeypatch.setattr(movers, "MIN_COPY_WIDTH", 1)


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize(("ahead", "each"), [(1, 2), (2, 4), (1, 13), (0, 13), (3, 4)])
def test_layers_that_go_ahead_and_those_that_follow_all_come(
    pools, emulated_transfers, monkeypatch, layout, ahead, each
):
    plan = Plan("staged", "by the test", 1.0, 3, each, direct_layers=ahead, in_order=each < 13)
    monkeypatch.setattr(planner, "plan_load", lambda *_, **__: plan)
    pool = pools.random_pool(layout, random.choice([(64, 128), (512,)]), layers=13, pages=9, page_size=2)
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=random.choice([2, 64])))
    host, device = pool.slots(pools.random_pages(9, 7, runs=True)), pool.slots(torch.randperm(10)[:7])
    pool.check_load(host, device, transfer_.load, now)
