"""The budget: which limit counts, and what its error says."""

import random
from pathlib import Path

import pytest

from hicache_pools.host_memory import allocate_host_buffer
from hicache_pools.memory_budget import HostMemoryBudget, HostMemoryBudgetError, host_memory

GIB = 1 << 30


class Machine:
    """A fake procfs and a fake tree of control groups."""

    def __init__(self, root: Path, total: int, available: int) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        text = f"MemTotal: {total // 1024} kB\nMemFree: 12 kB\nMemAvailable: {available // 1024} kB\n"
        (self.proc / "meminfo").write_text(text)

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> Path:
        directory = self.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(f"{text}\n")
        return directory

    def budget(self, reserve: int | None = None) -> HostMemoryBudget:
        return HostMemoryBudget(reserve, proc_root=self.proc, cgroup_root=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, 256 * GIB, 200 * GIB)


def test_without_control_groups_the_machine_is_the_limit(machine: Machine) -> None:
    assert machine.budget().memory() == (256 * GIB, 200 * GIB, "machine")


def test_a_version_2_group_with_less_left_is_the_limit(machine: Machine) -> None:
    machine.belongs_to("0::/pod/box")
    box = machine.group("pod/box", memory__max=64 * GIB, memory__current=24 * GIB)
    assert machine.budget().memory() == (64 * GIB, 40 * GIB, str(box))


def test_the_tightest_of_the_groups_above_counts(machine: Machine) -> None:
    machine.belongs_to("0::/pod/box")
    machine.group("pod/box", memory__max="max", memory__current=GIB)
    pod = machine.group("pod", memory__max=32 * GIB, memory__current=30 * GIB)
    assert machine.budget().memory() == (32 * GIB, 2 * GIB, str(pod))


def test_page_cache_of_a_group_counts_as_free(machine: Machine) -> None:
    machine.belongs_to("0::/")
    machine.group("", memory__max=64 * GIB, memory__current=60 * GIB, memory__stat=f"anon 7\ninactive_file {50 * GIB}")
    assert machine.budget().memory().free == 54 * GIB


def test_a_group_path_of_the_host_falls_back_to_the_containers_root(machine: Machine) -> None:
    machine.belongs_to("0::/kubepods/burstable/pod17")
    root = machine.group("", memory__max=16 * GIB, memory__current=GIB)
    assert machine.budget().memory() == (16 * GIB, 15 * GIB, str(root))


def test_a_group_path_outside_the_namespace_is_not_followed(machine: Machine) -> None:
    machine.belongs_to("0::/../elsewhere")
    (machine.cgroup.parent / "elsewhere").mkdir()
    (machine.cgroup.parent / "elsewhere" / "memory.max").write_text("1")
    (machine.cgroup.parent / "elsewhere" / "memory.current").write_text("1")
    assert machine.budget().memory().limited_by == "machine"


def test_a_version_1_group_is_read_and_its_absurd_number_means_no_limit(machine: Machine) -> None:
    machine.belongs_to("3:cpuset:/", "4:cpu,memory:/job")
    machine.group("memory", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=GIB)
    job = machine.group(
        "memory/job",
        memory__limit_in_bytes=8 * GIB,
        memory__usage_in_bytes=4 * GIB,
        memory__stat=f"inactive_file 5\ntotal_inactive_file {GIB}",
    )
    assert machine.budget().memory() == (8 * GIB, 5 * GIB, str(job))


def test_a_group_above_its_limit_has_nothing_free(machine: Machine) -> None:
    machine.belongs_to("0::/")
    machine.group("", memory__max=GIB, memory__current=2 * GIB)
    assert machine.budget().memory().free == 0


def test_the_error_gives_asked_free_and_reserve(machine: Machine) -> None:
    asked, reserve = random.randrange(190 * GIB, 300 * GIB), 11 * GIB
    with pytest.raises(HostMemoryBudgetError) as caught:
        machine.budget(reserve).check(asked)
    assert (caught.value.asked, caught.value.free, caught.value.reserve) == (asked, 200 * GIB, reserve)
    for number in (asked, 200 * GIB, reserve, 189 * GIB):
        assert str(number) in str(caught.value)


def test_the_last_byte_of_the_budget_is_given_and_no_more(machine: Machine) -> None:
    machine.budget(GIB).check(199 * GIB)
    with pytest.raises(HostMemoryBudgetError):
        machine.budget(GIB).check(199 * GIB + 1)


def test_the_default_reserve_is_a_sixteenth_but_at_most_ten_gib(machine: Machine, tmp_path: Path) -> None:
    machine.budget().check(190 * GIB)
    with pytest.raises(HostMemoryBudgetError):
        machine.budget().check(190 * GIB + 1)
    small = Machine(tmp_path / "small", 16 * GIB, 8 * GIB)
    small.budget().check(7 * GIB)
    with pytest.raises(HostMemoryBudgetError):
        small.budget().check(7 * GIB + 1)


def test_a_buffer_beyond_the_budget_is_refused_before_it_is_mapped(machine: Machine) -> None:
    with pytest.raises(HostMemoryBudgetError):
        allocate_host_buffer(2 << 20, pin=False, page_bytes=4096, budget=machine.budget(200 * GIB))


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert 0 < memory.free <= memory.total


def test_a_meminfo_that_tells_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 12 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        host_memory(proc_root=tmp_path, cgroup_root=tmp_path)
