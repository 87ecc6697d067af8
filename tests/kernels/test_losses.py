"""What a model loses next to transfers: the measuring, with a clock that is made up."""

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hicache_kernels import DeviceRows, HostLayout, HostRows, Plane, PlaneTransfer, host_strides, losses
from hicache_kernels.calibrate import CTAS, wrong_figure
from hicache_kernels.constants import H200, Compute, DeviceConstants, ModelLoss
from hicache_kernels.losses import MAX_SPREAD, PLAIN, GraphTimes, Mover, with_losses
from hicache_kernels.staging import Direction

BLANK = dataclasses.replace(
    H200,
    **{
        way: dataclasses.replace(getattr(H200, way), staged_loss=ModelLoss(0.0, 0.0), direct_losses=())
        for way in ("write_back", "load")
    },
)
"""An H200 whose losses have not been measured."""


def clock(truth: DeviceConstants, plain_seconds: Callable[[], float]) -> Callable[[Compute, Mover], float]:
    """A device on which graphs take as long as the losses of ``truth`` make them."""

    def seconds(compute: Compute, mover: Mover) -> float:
        way = getattr(truth, mover.direction.value)
        loss = 0.0
        if mover.policy != PLAIN:
            loss = (way.staged_loss if mover.ctas is None else way.loss(mover.ctas)).during(compute)
        return plain_seconds() / (1 - loss)

    return seconds


def random_losses() -> DeviceConstants:
    def loss(most: float) -> ModelLoss:
        return ModelLoss(random.uniform(0, most), random.uniform(0, most))

    ways = {
        way: dataclasses.replace(
            getattr(H200, way), staged_loss=loss(0.4), direct_losses=tuple((ctas, loss(0.9)) for ctas in CTAS)
        )
        for way in ("write_back", "load")
    }
    return dataclasses.replace(H200, **ways, losses_measured=True)


def flat(constants: DeviceConstants) -> list[float]:
    return [
        share
        for way in (constants.write_back, constants.load)
        for loss in (way.staged_loss, *(loss for _, loss in way.direct_losses))
        for share in (loss.prefill, loss.decode)
    ]


def test_losses_are_found_next_to_every_mover_of_both_directions() -> None:
    truth = random_losses()
    found = with_losses(BLANK, clock(truth, lambda: 2e-3), CTAS)
    assert flat(found) == pytest.approx(flat(truth))
    assert [ctas for ctas, _ in found.load.direct_losses] == list(CTAS)
    assert found.losses_measured
    assert dataclasses.replace(found, write_back=H200.write_back, load=H200.load, losses_measured=False) == H200
    assert wrong_figure(found) is None


def test_clocks_that_change_between_turns_change_no_loss() -> None:
    truth = random_losses()
    calls = 0

    def slower() -> float:
        nonlocal calls
        calls += 1
        turn = (calls - 1) // (2 + len(CTAS))
        return 2e-3 * (1 + 0.04 * turn)

    # 4% from turn to turn, which is within what equal measurements may differ by only in the three turns of a graph.
    assert flat(with_losses(BLANK, clock(truth, slower), CTAS)) == pytest.approx(flat(truth))


def test_one_disturbed_measurement_in_three_changes_no_loss() -> None:
    truth = random_losses()
    calm = clock(truth, lambda: 2e-3)
    disturbed = random.randrange(3)
    seen: dict[tuple[Compute, Mover], int] = {}

    def seconds(compute: Compute, mover: Mover) -> float:
        turn = seen[compute, mover] = seen.get((compute, mover), -1) + 1
        return calm(compute, mover) * (3 if turn == disturbed and mover.policy != PLAIN else 1)

    assert flat(with_losses(BLANK, seconds, CTAS)) == pytest.approx(flat(truth))


def test_movers_take_turns_with_plain_copies() -> None:
    calls: list[tuple[Compute, Mover]] = []
    with_losses(BLANK, lambda *call: calls.append(call) or 1e-3, CTAS, repeats=2)
    turn = 2 + len(CTAS)
    assert len(calls) == 2 * 2 * 2 * turn
    for start in range(0, len(calls), turn):
        computes, movers = zip(*calls[start : start + turn], strict=True)
        assert len(set(computes)) == 1
        assert movers[0].policy == PLAIN
        assert [mover.ctas for mover in movers] == [None, None, *CTAS]
    assert {mover.direction for _, mover in calls} == set(Direction)


def test_a_model_that_is_faster_next_to_a_mover_than_next_to_a_copy_loses_nothing() -> None:
    found = with_losses(BLANK, lambda _, mover: 1e-3 if mover.policy == PLAIN else 0.9e-3, CTAS)
    assert set(flat(found)) == {0.0}


@pytest.mark.parametrize("compute", [Compute.PREFILL, Compute.DECODE])
def test_plain_copies_that_differ_are_a_device_that_others_use(compute: Compute) -> None:
    turns = iter([1e-3, MAX_SPREAD * 1.01e-3, 1e-3] * 10)
    with pytest.raises(RuntimeError, match=rf"a {compute} graph .* 1.000 to 1.212 ms: others use the device"):
        with_losses(BLANK, lambda what, mover: next(turns) if what is compute and mover.policy == PLAIN else 1e-3, CTAS)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("policy", "ctas"), [(PLAIN, None), ("staged", None), ("direct", 1), ("direct", 8)])
def test_each_mover_moves_all_bytes_next_to_the_graph_of_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, direction: Direction, policy: str, ctas: int | None
) -> None:
    names = {"prefill": SimpleNamespace(name="prefill", graph="p"), "decode": SimpleNamespace(name="decode", graph="d")}
    monkeypatch.setattr(losses, "workloads", lambda *_, **__: tuple(names.values()))
    monkeypatch.setattr(losses, "Transfers", lambda _, move, count: [move] * count)
    pages, page_size, layers, row_bytes = 6, 2, 3, 64
    host, rows = (torch.randint(0, 256, (pages * page_size * layers * row_bytes,), dtype=torch.uint8) for _ in range(2))
    (strides,) = host_strides(
        HostLayout.PAGE_FIRST_DIRECT, [row_bytes], layers=layers, pages=pages, page_size=page_size
    )
    device = DeviceRows.slot_major(list(rows.view(layers, pages * page_size, row_bytes)))
    plane = Plane("rows", row_bytes, device, HostRows(host, strides, pages, page_size))
    times = GraphTimes(PlaneTransfer([plane], constants=H200), host, rows)
    source, target = (rows, host) if direction is Direction.WRITE_BACK else (host, rows)
    before = source.clone()
    seen = []

    def replay(graph: str, *_: object) -> float:
        seen.append(graph)
        expected = before
        if policy != PLAIN:
            page_first = before.view(pages, layers, page_size * row_bytes)
            expected = page_first.transpose(0, 1).reshape(-1)
            if direction is Direction.WRITE_BACK:
                expected = before.view(layers, pages, page_size * row_bytes).transpose(0, 1).reshape(-1)
        assert torch.equal(target, expected)
        assert torch.equal(source, before)
        return 0.125

    monkeypatch.setattr(losses, "replay_seconds", replay)
    for compute, graph in ((Compute.PREFILL, "p"), (Compute.DECODE, "d")):
        target.random_(0, 256)
        assert times.seconds(compute, Mover(direction, policy, ctas)) == 0.125
        assert seen.pop() == graph
