"""Capacity planning: what each tier holds of a model's cache, how long, and what loading costs against recomputing.

``hicache capacity`` shows it. Nothing here touches a device: sizes are arithmetic, hit rates come from a replay of a
trace that moves no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..replay import ReplayError, ReplayOptions
from ..trace import BLOCK_TOKENS, TraceRequest
from .geometry import CapacityError, ModelGeometry

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)
_MAX_SIZE = 1 << 62
_RATES = (1e-9, 1e18)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``40GB`` (10**9 each), ``512GiB`` (2**30 each) or ``1000000``.

    Raises
    ------
    CapacityError
        Where it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise CapacityError(
            f"size is {text!r}; a number with KB, MB, GB, TB, KiB, MiB, GiB, TiB or nothing is expected"
        )
    base = 1024 if found[3] else 1000
    size = int(Fraction(found[1]) * base ** _UNITS[found[2].upper()])
    if size > _MAX_SIZE:
        raise CapacityError(f"size is {text!r}; at most {_MAX_SIZE} bytes are accepted")
    return size


@dataclass(frozen=True)
class Tier:
    """What fits into one tier.

    Attributes
    ----------
    name
        ``L1``, ``L2`` or ``L3``.
    bytes
        Its size.
    pages, tokens
        Pages and tokens of prompts of the planned length that fit.
    seconds
        How long a page stays if every request were new: ``tokens`` over the tokens that arrive; None without a rate.
    """

    name: str
    bytes: int
    pages: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class LoadTime:
    """Time to bring a prompt of the planned length to the device.

    Attributes
    ----------
    name
        ``L2`` (over the bus) or ``L3`` (from storage, then over the bus).
    seconds
        Bytes over bandwidth.
    break_even_tokens_per_second
        Loading is faster than recomputing wherever prefill does fewer tokens a second.
    speedup
        Recomputing time over loading time; None without a prefill speed.
    """

    name: str
    seconds: float
    break_even_tokens_per_second: float
    speedup: float | None


@dataclass(frozen=True)
class CapacityPlan:
    """The whole answer.

    Attributes
    ----------
    geometry
        The model's.
    page_size, page_bytes
        Tokens and bytes of a page of the anchor.
    prompt_tokens, prompt_bytes
        The planned prompt, and what it takes in the cache.
    tiers
        L1, then L2 and L3 where they have bytes.
    loads
        From L2, and from L3 where a storage bandwidth is known.
    recompute_seconds
        Prefill of the planned prompt; None without a prefill speed.
    write_back_bytes_per_second
        Most that write-back moves: every arriving token is new; None without a rate.
    """

    geometry: ModelGeometry
    page_size: int
    page_bytes: int
    prompt_tokens: int
    prompt_bytes: int
    tiers: tuple[Tier, ...]
    loads: tuple[LoadTime, ...]
    recompute_seconds: float | None
    write_back_bytes_per_second: float | None


def plan_capacity(
    geometry: ModelGeometry,
    *,
    device_bytes: int,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    page_size: int = 64,
    prompt_tokens: int = 4096,
    requests_per_second: float | None = None,
    bus_bytes_per_second: float = 55e9,
    disk_bytes_per_second: float | None = None,
    prefill_tokens_per_second: float | None = None,
) -> CapacityPlan:
    """Work out what the tiers hold and what loading costs.

    Parameters
    ----------
    geometry
        The model's bytes on one rank.
    device_bytes, host_bytes, disk_bytes
        Size of the device pool, the host pools and the storage of that rank; 0 for no such tier.
    page_size, prompt_tokens
        Tokens a page, and of a typical prompt.
    requests_per_second
        Prompts that arrive.
    bus_bytes_per_second, disk_bytes_per_second
        Bandwidth between host and device, and from storage to host.
    prefill_tokens_per_second
        Measured prefill speed of the engine at about this length.

    Raises
    ------
    CapacityError
        Naming the argument that is out of range.
    """
    for name, size, least in (
        ("device_bytes", device_bytes, 1),
        ("host_bytes", host_bytes, 0),
        ("disk_bytes", disk_bytes, 0),
        ("page_size", page_size, 1),
        ("prompt_tokens", prompt_tokens, 1),
    ):
        if not least <= size <= _MAX_SIZE:
            raise CapacityError(f"{name} is {size}; accepted is {least} to {_MAX_SIZE}")
    for name, rate in (
        ("bus_bytes_per_second", bus_bytes_per_second),
        ("requests_per_second", requests_per_second),
        ("disk_bytes_per_second", disk_bytes_per_second),
        ("prefill_tokens_per_second", prefill_tokens_per_second),
    ):
        if rate is not None and not _RATES[0] <= rate <= _RATES[1]:
            raise CapacityError(f"{name} is {rate}; accepted is {_RATES[0]:g} to {_RATES[1]:g}")
    if prompt_tokens < page_size:
        raise CapacityError(f"prompt_tokens is {prompt_tokens}; at least a page of {page_size} tokens is expected")
    arriving = None if requests_per_second is None else requests_per_second * prompt_tokens
    prompt_bytes = geometry.prompt_bytes(prompt_tokens, page_size)
    tiers = tuple(
        _tier(name, size, geometry, page_size, prompt_tokens, arriving)
        for name, size in (("L1", device_bytes), ("L2", host_bytes), ("L3", disk_bytes))
        if size
    )
    cached_tokens = prompt_tokens // page_size * page_size
    recompute = None if prefill_tokens_per_second is None else cached_tokens / prefill_tokens_per_second
    over_bus = prompt_bytes / bus_bytes_per_second
    seconds = {"L2": over_bus}
    if disk_bytes_per_second is not None:
        seconds["L3"] = over_bus + prompt_bytes / disk_bytes_per_second
    return CapacityPlan(
        geometry=geometry,
        page_size=page_size,
        page_bytes=geometry.page_bytes(page_size),
        prompt_tokens=prompt_tokens,
        prompt_bytes=prompt_bytes,
        tiers=tiers,
        loads=tuple(
            LoadTime(name, time, cached_tokens / time, None if recompute is None else recompute / time)
            for name, time in seconds.items()
        ),
        recompute_seconds=recompute,
        write_back_bytes_per_second=None if requests_per_second is None else requests_per_second * prompt_bytes,
    )


def _tier(
    name: str, size: int, geometry: ModelGeometry, page_size: int, prompt_tokens: int, arriving: float | None
) -> Tier:
    prompt_pages = prompt_tokens // page_size
    prompt_bytes = (
        disk_prompt_bytes(geometry, prompt_tokens, page_size)
        if name == "L3"
        else geometry.prompt_bytes(prompt_tokens, page_size)
    )
    pages = size * prompt_pages // prompt_bytes
    tokens = pages * page_size
    return Tier(name, size, pages, tokens, None if arriving is None else tokens / arriving)


def disk_prompt_bytes(geometry: ModelGeometry, tokens: int, page_size: int) -> int:
    """Bytes a cached prompt takes in a file storage: a file a page of each pool, footer included, in disk blocks."""
    from ...storage.directory import disk_bytes as bytes_on_disk
    from ...storage.page_file import FOOTER_BYTES

    pages = tokens // page_size
    window_pages = min(pages, -(-geometry.window_tokens // page_size))
    files = (
        (pages, geometry.page_bytes(page_size)),
        (window_pages, page_size * geometry.window_bytes),
        (min(pages, 1), geometry.state_bytes),
    )
    return sum(count * bytes_on_disk(size + FOOTER_BYTES) for count, size in files if size)


@dataclass(frozen=True)
class ExpectedHits:
    """Where the tokens of a trace's complete blocks of 512 would come from, as shares of all of them.

    Attributes
    ----------
    requests, tokens
        Requests replayed, and tokens of their complete blocks.
    l1, l2, l3, missed
        Shares; they add up to 1.
    requests_per_second
        Arrivals of the trace; None where its timestamps span no time.
    prefill_tokens_per_second
        Missed tokens a second at that rate: what the engine still computes, and what write-back moves.
    """

    requests: int
    tokens: int
    l1: float
    l2: float
    l3: float
    missed: float
    requests_per_second: float | None
    prefill_tokens_per_second: float | None


def trace_means(requests: Sequence[TraceRequest]) -> tuple[int, float | None]:
    """Mean prompt length in tokens, and arrivals a second (None where the timestamps span no time)."""
    tokens = round(sum(request.input_length for request in requests) / len(requests))
    seconds = (max(r.timestamp for r in requests) - min(r.timestamp for r in requests)) / 1e3
    return tokens, len(requests) / seconds if seconds else None


def expected_hits(requests: Sequence[TraceRequest], plan: CapacityPlan) -> ExpectedHits:
    """Replay a trace against tiers of the planned size, without bytes, a page a block of 512 tokens.

    Raises
    ------
    CapacityError
        Where a tier cannot hold the largest request, or there is no L2: the replay has one.
    """
    blocks = {tier.name: tier.tokens // BLOCK_TOKENS for tier in plan.tiers}
    if "L2" not in blocks:
        raise CapacityError("host_bytes is 0; a trace is replayed against a device and a host tier")
    largest = max(len(request.blocks) for request in requests)
    for name in ("L1", "L2"):
        if blocks[name] < largest:
            raise CapacityError(
                f"{name} holds {blocks[name] * BLOCK_TOKENS} tokens; the largest request of the trace needs "
                f"{largest * BLOCK_TOKENS}"
            )
    # More than this is never in use, and tracking pages costs memory.
    most = largest + 2 * len({block for request in requests for block in request.blocks})
    options = ReplayOptions(
        pool="mla",
        layers=1,
        row_bytes=4,
        page_size=BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        l1_pages=max(min(blocks["L1"], most), 1),
        l2_pages=max(min(blocks["L2"], most), 1),
        data=False,
    )
    options = replace(options, l3_bytes=blocks.get("L3", 0) * options.page_bytes)
    from ..replay import Replay

    try:
        with Replay(requests, options) as replay:
            report = replay.run()
    except ReplayError as error:
        raise CapacityError(str(error)) from None
    total = max(report.blocks, 1)
    shares = [hits / total for hits in (report.l1_hits, report.l2_hits, report.l3_hits)]
    rate = trace_means(requests)[1]
    missed_tokens = report.misses * BLOCK_TOKENS / max(report.requests, 1)
    return ExpectedHits(
        requests=report.requests,
        tokens=report.tokens,
        l1=shares[0],
        l2=shares[1],
        l3=shares[2],
        missed=report.misses / total,
        requests_per_second=rate,
        prefill_tokens_per_second=None if rate is None else rate * missed_tokens,
    )
