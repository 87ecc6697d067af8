"""``hicache capacity``: what fits into each tier, how long it stays, and what loading costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from hicache_kernels.command_line import CommandError, read_json, show

from ..command_options import JsonFile, check_results, write_figures
from ..trace import TraceError, TraceRequest, read_trace
from .geometry import (
    CapacityError,
    ModelGeometry,
    attention_token_bytes,
    geometry_from_config,
    latent_token_bytes,
)
from .plan import CapacityPlan, ExpectedHits, expected_hits, parse_bytes, plan_capacity, trace_means

DEFAULT_DTYPE = "bfloat16"


def capacity(
    gpu: Annotated[str, typer.Option(help="Device pool of one rank: 40GB, 32GiB or bytes.")],
    host: Annotated[str, typer.Option(help="Host pools of that rank.")] = "0",
    disk: Annotated[str, typer.Option(help="File storage of that rank.")] = "0",
    config: Annotated[Path | None, typer.Option(help="config.json of a Hugging Face model, or its directory.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers with a KV cache.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads on this rank.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Values of a head.")] = None,
    latent_dim: Annotated[int | None, typer.Option(help="MLA, instead of heads: latent and rope values.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the cache; by default the config's, else bfloat16.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; with --config.")] = 1,
    state: Annotated[str, typer.Option(help="One recurrent state of this rank, all layers.")] = "0",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a typical prompt; by default the trace's mean, else 4096.")
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Prompts that arrive; by default as in the trace.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Trace to expect hits from, in the format of hicache replay.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first N requests of the trace.")] = None,
    bus_gb_s: Annotated[float, typer.Option(help="Host to device, 10**9 bytes a second; 55: PCIe 5 x16.")] = 55.0,
    disk_gb_s: Annotated[float | None, typer.Option(help="Storage to host, 10**9 bytes a second.")] = None,
    prefill_tokens_per_second: Annotated[float | None, typer.Option(help="Prefill speed you measured.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Plan capacity: tokens a tier, how long they stay, time to load a prompt against recomputing it.

    Give the model's shape (--layers with --kv-heads and --head-dim, or with --latent-dim) or --config. Sizes are those
    of one rank. With --trace the expected hits come from a replay that moves no bytes.
    """
    check_results(json_file, None, config, trace)
    try:
        shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "latent_dim": latent_dim}
        geometry = model_geometry(config, shape, dtype, tp, parse_bytes(state))
        loaded = None if trace is None else _load(trace, requests)
        mean, rate = (4096, None) if loaded is None else trace_means(loaded)
        plan = plan_capacity(
            geometry,
            device_bytes=parse_bytes(gpu),
            host_bytes=parse_bytes(host),
            disk_bytes=parse_bytes(disk),
            page_size=page_size,
            prompt_tokens=mean if prompt_tokens is None else prompt_tokens,
            requests_per_second=rate if requests_per_second is None else requests_per_second,
            bus_bytes_per_second=bus_gb_s * 1e9,
            disk_bytes_per_second=None if disk_gb_s is None else disk_gb_s * 1e9,
            prefill_tokens_per_second=prefill_tokens_per_second,
        )
        hits = None if loaded is None else expected_hits(loaded, plan)
    except (CapacityError, TraceError) as error:
        raise CommandError(str(error)) from None
    show(tables(plan, hits))
    figures = {"plan": dataclasses.asdict(plan), "hits": None if hits is None else dataclasses.asdict(hits)}
    write_figures(json_file, figures)


def model_geometry(
    config: Path | None, shape: dict[str, int | None], dtype: str | None, tp: int, state_bytes: int
) -> ModelGeometry:
    """Geometry from a config file or from the shape given in options.

    Raises
    ------
    CapacityError
        Where neither or both are given, or one of them does not make a geometry.
    CommandError
        Where the config cannot be read.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    if config is not None:
        if given:
            raise CapacityError(f"--config and --{next(iter(given)).replace('_', '-')} are both given; accepted is one")
        path = config / "config.json" if config.is_dir() else config
        fields = read_json("--config", path)
        if not isinstance(fields, dict):
            raise CapacityError(f"--config is {path}; a JSON object is expected")
        return geometry_from_config(fields, dtype=dtype, tp=tp, state_bytes=state_bytes)
    if tp != 1:
        raise CapacityError("--tp needs --config; with a shape, give the KV heads of one rank")
    kind = dtype or DEFAULT_DTYPE
    if set(given) == {"layers", "kv_heads", "head_dim"}:
        tokens = attention_token_bytes(given["layers"], given["kv_heads"], given["head_dim"], kind)
    elif set(given) == {"layers", "latent_dim"}:
        tokens = latent_token_bytes(given["layers"], given["latent_dim"], kind)
    else:
        raise CapacityError("give --config, or --layers with --kv-heads and --head-dim, or --layers with --latent-dim")
    return ModelGeometry(tokens, state_bytes=state_bytes)


def _load(trace: Path, limit: int | None) -> list[TraceRequest]:
    if limit is not None and limit <= 0:
        raise CapacityError(f"--requests is {limit}; it must be positive")
    return read_trace(trace, limit)


def tables(plan: CapacityPlan, hits: ExpectedHits | None) -> Group:
    """Everything as tables."""
    parts: list[Any] = [_model_table(plan), _tier_table(plan), _load_table(plan)]
    parts += [_hit_table(hits)] if hits is not None else []
    return Group(*parts)


def _model_table(plan: CapacityPlan) -> Table:
    geometry = plan.geometry
    found = _table("What a token costs", "what", "value")
    found.add_row("bytes a token", f"{geometry.token_bytes:,}")
    if geometry.window_bytes:
        found.add_row(f"and in windows of {geometry.window_tokens:,} tokens", f"{geometry.window_bytes:,}")
    if geometry.state_bytes:
        found.add_row("bytes of a recurrent state", f"{geometry.state_bytes:,}")
    found.add_row(f"bytes a page of {plan.page_size} tokens", f"{plan.page_bytes:,}")
    found.add_row(f"a prompt of {plan.prompt_tokens:,} tokens", size(plan.prompt_bytes))
    found.caption = "; ".join(geometry.notes) or None
    return found


def _tier_table(plan: CapacityPlan) -> Table:
    found = _table("What fits", "tier", "size", "pages", "tokens", "prompts", "kept at least")
    for tier in plan.tiers:
        prompts = tier.pages // max(plan.prompt_tokens // plan.page_size, 1)
        kept = "-" if tier.seconds is None else duration(tier.seconds)
        found.add_row(tier.name, size(tier.bytes), f"{tier.pages:,}", f"{tier.tokens:,}", f"{prompts:,}", kept)
    if plan.write_back_bytes_per_second is not None:
        found.caption = f"write-back moves at most {size(plan.write_back_bytes_per_second)}/s"
    return found


def _load_table(plan: CapacityPlan) -> Table:
    found = _table("Loading a prompt", "from", "time", "faster than recomputing below", "speed-up")
    for load in plan.loads:
        below = f"{load.break_even_tokens_per_second:,.0f} tokens/s"
        found.add_row(load.name, duration(load.seconds), below, "-" if load.speedup is None else f"{load.speedup:.1f}")
    if plan.recompute_seconds is not None:
        found.add_row("recomputing", duration(plan.recompute_seconds), "", "1.0")
    return found


def _hit_table(hits: ExpectedHits) -> Table:
    found = _table(f"Expected hits, {hits.requests:,} requests", "tier", "percent of tokens")
    for name, share in (("L1", hits.l1), ("L2", hits.l2), ("L3", hits.l3), ("computed", hits.missed)):
        found.add_row(name, f"{100 * share:.1f}")
    if hits.prefill_tokens_per_second is not None:
        found.caption = (
            f"{hits.requests_per_second:.3g} requests/s leave {hits.prefill_tokens_per_second:,.0f} tokens/s to compute"
        )
    return found


def _table(title: str, *columns: str) -> Table:
    found = Table(title=title, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        found.add_column(column, justify="right" if number else "left")
    return found


def size(count: float) -> str:
    """Show a number of bytes with three digits and a unit of 10**3."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Show a time with three digits and the unit that suits it."""
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:,.3g} h" if hours < 48 else f"{hours / 24:,.0f} days"
