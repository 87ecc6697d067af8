"""The planner, on invented constants: paths, reasons, quotas, demands."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_kernels import HostLayout, planner
from hicache_kernels.constants import CPU, DIRECT_CEILING, H200, Compute, DeviceConstants, DirectionConstants
from hicache_kernels.direct_cost import ROW_KERNEL_LOSS, ROWS_PER_CTA_SECOND, shares_one_event
from hicache_kernels.planner import (
    STAGED_PREFERENCE,
    Availability,
    PathUnavailableError,
    plan_load,
    plan_write_back,
)
from hicache_kernels.staged_cost import (
    MIN_AHEAD_BYTES,
    SUBMIT_MARGIN,
    copy_sizes,
    layer_groups,
    least_staged_load_cost,
    least_staged_write_back_cost,
    moved_before,
    staged_load_plan,
)
from hicache_kernels.work import Plan, Work

LAYOUTS = list(HostLayout)
PLANNERS = [plan_write_back, plan_load]
DIRECTION = DirectionConstants(
    copy_bytes_per_second=50e9,
    batch_copy_seconds=1e-6,
    batch_submit_seconds=2e-6,
    copy_seconds=3e-6,
    copy_2d_seconds=4e-6,
    width_efficiency=((256, 0.5), (4096, 0.6), (32768, 1.0)),
    direct_rates=((1, 10e9), (4, 43e9), (8, 45e9)),
)
CONSTANTS = DeviceConstants("invented", DIRECTION, DIRECTION, launch_seconds=5e-6, relayout_bytes_per_second=1e12)


def work(*, pages: int, runs: int, page_bytes: int, layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT) -> Work:
    return Work(layout, pages, runs, page_bytes, page_size=16, layers=32, planes=2, row_bytes=1024)


works = st.builds(
    lambda layout, pages, runs, page_kilobytes, page_size, layers: Work(
        layout, pages, min(runs, pages), page_kilobytes * layers * page_size * 2, page_size, layers, 2, page_kilobytes
    ),
    st.sampled_from(LAYOUTS),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.sampled_from([1, 16, 64, 256]),
    st.integers(1, 128),
)


def test_one_long_run_is_written_back_staged() -> None:
    plan = plan_write_back(work(pages=256, runs=1, page_bytes=2 << 20), constants=CONSTANTS)
    assert plan.path == "staged"
    assert plan.block_quota == 0
    assert "256 pages" in plan.reason
    assert "1 runs" in plan.reason


def test_scattered_small_pages_are_written_back_directly() -> None:
    plan = plan_write_back(work(pages=8192, runs=8192, page_bytes=32 << 10), constants=CONSTANTS)
    assert plan.path == "direct"
    assert plan.block_quota == DIRECTION.default_ctas == 4


def test_layer_by_layer_load_of_narrow_shares_goes_direct_and_of_wide_shares_staged() -> None:
    narrow = Work(HostLayout.PAGE_FIRST, 1024, 1, 512 << 10, page_size=16, layers=32, planes=2)
    wide = dataclasses.replace(narrow, layout=HostLayout.PAGE_FIRST_DIRECT, page_bytes=2 << 20)
    assert plan_load(narrow, constants=CONSTANTS).path == "direct"
    assert plan_load(wide, constants=CONSTANTS).path == "staged"


def test_all_layers_in_one_call_save_the_launches_of_a_direct_load() -> None:
    narrow = Work(HostLayout.PAGE_FIRST, 64, 1, 512 << 10, page_size=16, layers=32, planes=2)
    by_layer, at_once = (
        plan_load(narrow, constants=CONSTANTS, policy="direct", layer_by_layer=layers).expected_seconds
        for layers in (True, False)
    )
    assert by_layer - at_once == pytest.approx(31 * CONSTANTS.launch_seconds)


@pytest.mark.parametrize("planner", PLANNERS)
@given(work=works)
def test_auto_takes_the_path_that_costs_less(planner, work: Work) -> None:
    auto = planner(work, constants=CONSTANTS)
    staged = planner(work, constants=CONSTANTS, policy="staged")
    direct = planner(work, constants=CONSTANTS, policy="direct")
    assert auto.cost == min(staged.cost, direct.cost)
    assert auto.path == ("staged" if staged.cost <= direct.cost else "direct")


small_works = st.builds(
    lambda layout, row_bytes, page_size, layers, planes, pages, runs: Work(
        layout, pages, min(runs, pages), row_bytes * page_size * layers * planes, page_size, layers, planes, row_bytes
    ),
    st.sampled_from(LAYOUTS),
    st.integers(1, 64).map(lambda each: 64 * each),
    st.sampled_from([1, 16, 64]),
    st.integers(1, 80),
    st.integers(1, 2),
    st.integers(1, 64),
    st.integers(1, 64),
).filter(lambda work: work.bytes < MIN_AHEAD_BYTES)


@pytest.mark.parametrize("planner", PLANNERS)
@given(
    work=small_works,
    runs=st.integers(1, 64),
    compute=st.sampled_from([None, "idle", "decode", "prefill"]),
    constants=st.sampled_from([H200, CONSTANTS, CPU]),
    layer_by_layer=st.booleans(),
)
def test_small_operations_are_planned_without_a_search_as_a_search_would_plan_them(
    planner, work: Work, runs: int, compute: str | None, constants: DeviceConstants, layer_by_layer: bool
) -> None:
    options = {"constants": constants, "compute": compute}
    if planner is plan_load:
        options["layer_by_layer"] = layer_by_layer
    auto = planner(work, **options)
    staged, direct = (planner(work, policy=policy, **options) for policy in ("staged", "direct"))
    expected = staged if staged.cost <= direct.cost else direct
    assert dataclasses.replace(auto, reason="", any_runs=False) == dataclasses.replace(expected, reason="")
    if auto.any_runs:
        assert planner(dataclasses.replace(work, runs=min(runs, work.pages)), **options) == auto


@given(
    work=small_works,
    compute=st.sampled_from([None, "idle", "decode", "prefill"]),
    constants=st.sampled_from([H200, CONSTANTS, CPU]),
    layer_by_layer=st.booleans(),
)
def test_no_staged_operation_costs_less_than_what_a_plan_without_a_search_goes_by(
    work: Work, compute: str | None, constants: DeviceConstants, layer_by_layer: bool
) -> None:
    found = None if compute is None else Compute(compute)
    sizes = (1,) if layer_by_layer else copy_sizes(work, 128 << 20)
    load = plan_load(work, policy="staged", constants=constants, compute=compute, layer_by_layer=layer_by_layer)
    assert least_staged_load_cost(work, constants, found, sizes) <= load.cost * (1 + 1e-9)
    write_back = plan_write_back(work, policy="staged", constants=constants, compute=compute)
    weighed = Compute.IDLE if found is None else found
    assert least_staged_write_back_cost(work, constants, weighed) <= write_back.cost * (1 + 1e-9)


@pytest.mark.parametrize("compute", [None, "idle", "decode", "prefill"])
def test_one_page_is_moved_directly_without_a_search(compute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "staged_load_plan", lambda *_, **__: pytest.fail("a search"))
    monkeypatch.setattr(planner, "staged_write_back_seconds", lambda *_, **__: pytest.fail("a search"))
    for row_bytes, layers, planes in ((128, 80, 2), (256, 80, 2), (1024, 28, 2), (1152, 61, 1), (2048, 32, 2)):
        page_bytes = 16 * row_bytes * layers * planes
        one = Work(HostLayout.PAGE_FIRST_DIRECT, 1, 1, page_bytes, 16, layers, planes, row_bytes)
        plans = [plan_load(one, compute=compute, layer_by_layer=False)]
        if compute in (None, "idle"):
            plans.append(plan_write_back(one, compute=compute))
        for found in plans:
            assert (found.path, found.any_runs) == ("direct", True)
            assert re.search(r"direct .* against staged at a cost of .* or more", found.reason)


def test_layers_of_a_load_share_an_event_only_where_it_is_over_before_as_many_could_be_queued() -> None:
    def shared(pages: int, layers: int) -> bool:
        some = Work(HostLayout.PAGE_FIRST, pages, pages, layers * (64 << 10), 16, layers, 2, 2048)
        return shares_one_event(plan_load(some, policy="direct", layer_by_layer=False), layers)

    for layers in (28, 32, 61, 80):
        assert shared(1, layers)
        assert not shared(16, layers)
    assert not shared(1, 2)  # two events are queued before a kernel has even started


@pytest.mark.parametrize("planner", PLANNERS)
@given(work=works, policy=st.sampled_from(["auto", "staged", "direct"]))
def test_no_path_is_expected_to_beat_the_bus(planner, work: Work, policy: str) -> None:
    plan = planner(work, policy=policy)
    assert plan.expected_seconds > work.bytes / 55.3e9
    assert plan.reason


@pytest.mark.parametrize("planner", PLANNERS)
@given(work=works, extra=st.integers(0, 4096))
def test_more_runs_never_make_a_staged_transfer_faster(planner, work: Work, extra: int) -> None:
    if work.layout is HostLayout.PAGE_FIRST and work.runs > 1:  # one copy alone costs more than one in a batch
        more = dataclasses.replace(work, runs=min(work.pages, work.runs + extra))
        fewer = planner(work, constants=CONSTANTS, policy="staged").expected_seconds
        assert planner(more, constants=CONSTANTS, policy="staged").expected_seconds >= fewer * 0.999


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_quota_caps_the_ctas_and_slows_the_direct_path(planner) -> None:
    scattered = work(pages=8192, runs=8192, page_bytes=32 << 10)
    free = planner(scattered, constants=CONSTANTS, policy="direct")
    capped = planner(scattered, constants=CONSTANTS, policy="direct", block_quota=1)
    assert capped.block_quota == 1
    assert capped.expected_seconds > 4 * free.expected_seconds
    assert planner(scattered, constants=CONSTANTS, policy="direct", block_quota=64).block_quota == 64


@pytest.mark.parametrize("planner", PLANNERS)
def test_quota_zero_forbids_the_direct_path(planner) -> None:
    scattered = work(pages=8192, runs=8192, page_bytes=32 << 10)
    plan = planner(scattered, constants=CONSTANTS, block_quota=0)
    assert plan.path == "staged"
    assert "block_quota is 0" in plan.reason
    with pytest.raises(PathUnavailableError, match="block_quota is 0"):
        planner(scattered, constants=CONSTANTS, block_quota=0, policy="direct")


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_missing_path_is_named_in_the_reason_of_auto(planner) -> None:
    run = work(pages=256, runs=1, page_bytes=2 << 20)
    no_staged = Availability(staged=False, staged_reason="row_bytes 20 is no multiple of 16")
    plan = planner(run, constants=CONSTANTS, available=no_staged)
    assert plan.path == "direct"
    assert "row_bytes 20" in plan.reason
    no_direct = Availability(direct=False, direct_reason="no compiler")
    plan = planner(work(pages=8192, runs=8192, page_bytes=4096), constants=CONSTANTS, available=no_direct)
    assert plan.path == "staged"
    assert "no compiler" in plan.reason


@pytest.mark.parametrize("planner", PLANNERS)
def test_without_any_compiled_path_auto_takes_the_reference_and_names_both_reasons(planner) -> None:
    nothing = Availability(False, False, "staged did not build", "main did not build")
    plan = planner(work(pages=2, runs=1, page_bytes=4096), available=nothing)
    assert plan.path == "reference"
    assert "staged did not build" in plan.reason
    assert "main did not build" in plan.reason


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("path", ["staged", "direct"])
def test_a_demanded_path_that_is_missing_raises_and_says_why(planner, path: str) -> None:
    nothing = Availability(False, False, "staged did not build", "main did not build")
    word = "staged did" if path == "staged" else "main did"
    with pytest.raises(PathUnavailableError, match=f"policy '{path}'.*{word} not build"):
        planner(work(pages=2, runs=1, page_bytes=4096), available=nothing, policy=path)


@pytest.mark.parametrize("planner", PLANNERS)
def test_unknown_policies_and_negative_quotas_are_named(planner) -> None:
    run = work(pages=2, runs=1, page_bytes=4096)
    with pytest.raises(ValueError, match=r"policy is 'fast'.*auto, staged, direct"):
        planner(run, policy="fast")
    with pytest.raises(ValueError, match="block_quota is -1"):
        planner(run, block_quota=-1)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_work_is_planned(planner, layout: HostLayout) -> None:
    assert isinstance(planner(work(pages=0, runs=0, page_bytes=4096, layout=layout)), Plan)


def test_width_efficiency_is_clamped_and_interpolated_by_the_logarithm() -> None:
    assert DIRECTION.efficiency(16) == 0.5
    assert DIRECTION.efficiency(256) == 0.5
    assert DIRECTION.efficiency(1024) == pytest.approx(0.55)
    assert DIRECTION.efficiency(4096) == pytest.approx(0.6)
    assert DIRECTION.efficiency(1 << 30) == 1.0


def test_the_rate_of_the_direct_path_lies_between_measured_numbers_of_ctas() -> None:
    assert DIRECTION.direct_rate(1) == 10e9
    assert DIRECTION.direct_rate(2) == pytest.approx(21e9)
    assert DIRECTION.direct_rate(4) == 43e9
    assert DIRECTION.direct_rate(1000) == 45e9


def test_small_copies_of_a_batch_wait_for_the_thread_that_submits_them() -> None:
    small = work(pages=4096, runs=4096, page_bytes=16 << 10)
    assert plan_write_back(small, constants=CONSTANTS, policy="staged").expected_seconds > 4096 * 2e-6
    large = work(pages=64, runs=64, page_bytes=1 << 20)
    seconds = plan_write_back(large, constants=CONSTANTS, policy="staged").expected_seconds
    assert seconds == pytest.approx(large.bytes / 50e9, rel=0.1)


def test_short_runs_of_wide_shares_are_planned_as_batches_and_long_ones_as_pitched_copies() -> None:
    def staged(pages: int, runs: int) -> float:
        wide = work(pages=pages, runs=runs, page_bytes=2 << 20)
        return plan_load(wide, constants=CONSTANTS, policy="staged").expected_seconds

    assert staged(512, 12) == pytest.approx(512 * (2 << 20) / 50e9 + 32 * 12 * 4e-6, rel=0.02)
    assert staged(512, 13) == pytest.approx(32 * 512 * 2e-6 * SUBMIT_MARGIN, rel=0.03)


def test_width_of_a_layer_follows_the_layout() -> None:
    run = work(pages=64, runs=2, page_bytes=32 * 16 * 2 * 1024)
    assert run.layer_width == 16 * 2 * 1024
    assert dataclasses.replace(run, layout=HostLayout.PAGE_FIRST).layer_width == 2 * 1024
    assert dataclasses.replace(run, layout=HostLayout.LAYER_FIRST).layer_width == 16 * 1024 * 32


def test_defaults_of_an_h200_follow_the_design_notes() -> None:
    assert H200.write_back.default_ctas == 2
    assert H200.load.default_ctas == 4
    small = Work(HostLayout.PAGE_FIRST, 512 << 20 >> 15, 512 << 20 >> 15, 32 << 10, 1, 8, 2, 2048)
    assert plan_write_back(small).path == "direct"
    large = dataclasses.replace(small, pages=128, runs=128, page_bytes=4 << 20, page_size=64)
    assert plan_write_back(large).path == "staged"


@given(first=st.integers(0, 5), layers=st.integers(1, 130), most=st.integers(1, 16))
def test_groups_of_layers_cover_all_and_none_is_larger_than_what_went_before(
    first: int, layers: int, most: int
) -> None:
    taken = first
    for start, end, each in layer_groups(first, first + layers, most):
        assert start == taken
        assert (end - start) % each == 0
        assert each <= min(most, max(1, start - first))
        taken = end
    assert taken == first + layers


def test_a_load_of_narrow_shares_takes_several_layers_a_copy_and_of_wide_ones_few() -> None:
    narrow = Work(HostLayout.PAGE_FIRST_DIRECT, 4096, 1, 4096 * 32, page_size=1, layers=32, planes=2, row_bytes=2048)
    wide = dataclasses.replace(narrow, pages=64, page_bytes=(256 << 10) * 32, page_size=64)
    by_runs = dataclasses.replace(wide, pages=512, runs=32, page_bytes=(32 << 10) * 32, page_size=16)
    assert plan_load(narrow, layer_by_layer=False, policy="staged").layers_each >= 8
    assert plan_load(wide, layer_by_layer=False, policy="staged").layers_each == 1
    assert plan_load(by_runs, layer_by_layer=False, policy="staged").layers_each >= 4
    narrow_rows_of_large_pages = dataclasses.replace(wide, runs=1, layout=HostLayout.PAGE_FIRST)
    assert plan_load(narrow_rows_of_large_pages, layer_by_layer=False, policy="staged").layers_each >= 8
    assert plan_load(narrow, layer_by_layer=True, policy="staged").layers_each == 1
    first_layer = dataclasses.replace(narrow, layout=HostLayout.LAYER_FIRST)
    assert plan_load(first_layer, layer_by_layer=False, policy="staged").layers_each == 1


def test_short_rows_and_uneven_ones_take_a_load_more_ctas_unless_a_quota_says_how_many() -> None:
    scattered = work(pages=4096, runs=4096, page_bytes=64 << 10)

    def plan(row_bytes: int, **options: object) -> Plan:
        return plan_load(dataclasses.replace(scattered, row_bytes=row_bytes), policy="direct", **options)

    rate = H200.load.direct_rate(2)
    assert plan(1024, block_quota=2).expected_seconds == pytest.approx(scattered.bytes / rate, rel=0.1)
    named = 2 * ROWS_PER_CTA_SECOND * 256
    assert plan(256, block_quota=2).expected_seconds == pytest.approx(scattered.bytes / named, rel=0.1)
    uneven = rate * (1 - ROW_KERNEL_LOSS / 2)
    assert plan(1024 + 64, block_quota=2).expected_seconds == pytest.approx(scattered.bytes / uneven, rel=0.1)
    assert plan(256, compute="idle").block_quota > plan(1024, compute="decode").block_quota


def test_loads_take_more_layers_a_copy_where_that_spares_the_caller() -> None:
    """Many short runs of wide shares are a copy a page: the bus does not care how wide, the caller does."""
    scattered = work(pages=256, runs=256, page_bytes=32 * (128 << 10))
    fast = dataclasses.replace(CONSTANTS.load, batch_submit_seconds=1e-9, batch_copy_seconds=1e-9)
    assert staged_load_plan(scattered, dataclasses.replace(CONSTANTS, load=fast), 64 << 20).layers_each == 1
    slow = dataclasses.replace(fast, batch_submit_seconds=0.4e-6)
    assert staged_load_plan(scattered, dataclasses.replace(CONSTANTS, load=slow), 64 << 20).layers_each > 1


SCATTERED_PAGES = Work(HostLayout.PAGE_FIRST_DIRECT, 819, 819, 640 << 10, 16, 80, 2, 256)
"""512 MiB of rows of 256 bytes, 80 layers, page by page."""


def test_a_load_takes_what_the_model_loses_into_account() -> None:
    rows = Work(HostLayout.PAGE_FIRST_DIRECT, 4096, 4096, 128 << 10, 1, 32, 2, 2048)
    fast = dataclasses.replace(H200.load, direct_rates=((1, 27e9), (2, 50e9), (4, 52e9)))
    constants = dataclasses.replace(H200, load=fast)
    decode, prefill, idle, unknown = (
        plan_load(rows, constants=constants, compute=compute, layer_by_layer=False)
        for compute in ("decode", "prefill", "idle", None)
    )
    assert (decode.path, decode.block_quota) == ("direct", 2)
    assert prefill.path == "staged"
    assert prefill.model_loss < 0.05
    assert idle.model_loss == 0
    assert "of the model" in decode.reason
    assert not prefill.in_order
    assert "the other layers all at once" in prefill.reason
    assert (unknown.path, unknown.block_quota, unknown.in_order) == ("direct", 2, True)
    assert unknown.model_loss == decode.model_loss == H200.load.loss(2).decode


def test_a_write_back_weighs_the_model_where_it_is_said_what_it_computes() -> None:
    small = Work(HostLayout.PAGE_FIRST, 16384, 16384, 32 << 10, 1, 8, 2, 2048)
    assert (plan_write_back(small).path, plan_write_back(small).block_quota) == ("direct", 2)
    unknown = plan_write_back(small)
    assert (unknown.model_loss, unknown.handicap) == (0, STAGED_PREFERENCE)
    assert plan_write_back(small, compute="decode").block_quota == 1


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("measured", [False, True])
def test_the_reason_says_what_the_model_loses_and_how_that_is_known(planner, policy: str, measured: bool) -> None:
    constants = dataclasses.replace(H200, losses_measured=measured)
    scattered = Work(HostLayout.PAGE_FIRST, 16384, 16384, 32 << 10, 1, 8, 2, 2048)
    source = r"\(measured on this device\)$" if measured else r"\(as on an H200\)$"
    for compute, who in (("prefill", "a prefill loses"), ("decode", "decode loses")):
        plan = planner(scattered, constants=constants, policy=policy, compute=compute)
        assert re.search(rf"{who} {plan.model_loss:.1%} of its time meanwhile {source}", plan.reason)
    unknown = planner(scattered, constants=constants, policy=policy)
    way = constants.write_back if planner is plan_write_back else constants.load
    loss = way.loss(unknown.block_quota) if unknown.path == "direct" else way.staged_loss
    if unknown.direct_layers == 0:
        assert re.search(rf"decode loses {loss.decode:.1%} of its time meanwhile {source}", unknown.reason)
    for nothing in (
        planner(scattered, constants=constants, policy=policy, compute="idle"),
        planner(scattered, constants=CPU, policy=policy, compute="decode"),
        planner(scattered, constants=constants, policy="reference", compute="decode"),
    ):
        assert "meanwhile" not in nothing.reason


def test_copies_behind_layers_that_go_ahead_wait_for_the_kernel_that_moves_them() -> None:
    """The start of a staged load, that of the kernel, and the end of the kernel are moments without bytes."""
    pause = 10e-6
    direct = plan_load(SCATTERED_PAGES, policy="direct", layer_by_layer=False)
    slow = dataclasses.replace(direct, expected_seconds=direct.expected_seconds + pause)
    slow_launches = dataclasses.replace(H200, launch_seconds=H200.launch_seconds + pause)
    before = staged_load_plan(SCATTERED_PAGES, H200, 64 << 20, None, direct, [16])
    after = staged_load_plan(SCATTERED_PAGES, slow_launches, 64 << 20, None, slow, [16])
    assert before.direct_layers == after.direct_layers > 0
    assert after.expected_seconds - before.expected_seconds == pytest.approx(3 * pause, rel=0.05)


@given(ahead=st.integers(0, 8), layers=st.integers(17, 130), most=st.sampled_from([1, 2, 4, 8, 16]))
def test_copies_behind_layers_that_went_ahead_are_no_larger_than_what_went_before(
    ahead: int, layers: int, most: int
) -> None:
    taken = ahead
    for start, end, each in layer_groups(ahead, layers, most, moved_before(ahead, most, layers)):
        assert start == taken
        assert each <= min(most, max(1, start))
        taken = end
    assert taken == layers
    assert layer_groups(ahead, layers, layers, moved_before(ahead, layers, layers)) == (
        (ahead, layers, layers - ahead),
    )


@pytest.mark.parametrize("planner", PLANNERS)
def test_an_unknown_computation_is_named(planner) -> None:
    with pytest.raises(ValueError, match="compute is 'training'; it must be one of prefill, decode, idle, or None"):
        planner(work(pages=2, runs=1, page_bytes=4096), compute="training")


def test_the_loss_beside_ctas_that_nobody_measured_is_that_of_more_of_them() -> None:
    losses = H200.load.direct_losses
    assert H200.load.loss(3) == losses[2][1]
    assert H200.load.loss(100) == losses[-1][1]
    assert DIRECTION.loss(2).during(None) == 0


def test_no_measured_rate_promises_more_than_such_transfers_reach() -> None:
    flattered = dataclasses.replace(DIRECTION, direct_rates=((1, 10e9), (2, 60e9)))
    assert flattered.direct_rate(1) == 10e9
    assert flattered.direct_rate(2) == DIRECT_CEILING * flattered.copy_bytes_per_second
