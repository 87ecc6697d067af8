"""Capacity planning: bytes against real pools, tiers against real storage and replays, every fault refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from hicache_controller.storage import FileStorage, Fingerprint
from hicache_controller.tools.capacity import (
    CapacityError,
    ModelGeometry,
    attention_token_bytes,
    disk_prompt_bytes,
    element_bytes,
    expected_hits,
    geometry_from_config,
    latent_token_bytes,
    parse_bytes,
    plan_capacity,
    trace_means,
)
from hicache_controller.tools.cli import app
from hicache_controller.tools.dtypes import ELEMENT_BYTES
from hicache_controller.tools.replay import Replay, ReplayOptions
from hicache_controller.tools.trace import BLOCK_TOKENS, TraceRequest, make_trace, write_trace
from hicache_pools import (
    DSAIndexerPoolHost,
    DSATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    cpu_simulation,
)

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(os.urandom(8))


@pytest.fixture
def chats() -> list[TraceRequest]:
    return make_trace(150, seed=int.from_bytes(os.urandom(4)))


def hicache(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["capacity", *map(str, arguments)])


# Bytes


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_page_has_the_bytes_of_a_real_pools_page(rng: random.Random, dtype: str) -> None:
    layers, heads, dim, page_size = (rng.randint(1, 5) for _ in range(4))
    torch_type: torch.dtype = vars(torch)[dtype]
    device_pool = MHATokenToKVPool(page_size, page_size, torch_type, heads, dim, layers)
    with cpu_simulation():
        host_pool = MHATokenToKVPoolHost(device_pool, 1, 0, page_size)
    geometry = ModelGeometry(attention_token_bytes(layers, heads, dim, dtype))
    assert geometry.page_bytes(page_size) == host_pool.page_bytes
    assert element_bytes(f"torch.{dtype}") == torch_type.itemsize
    host_pool.destroy()


def test_latents_and_index_keys_have_the_bytes_of_real_pools(rng: random.Random) -> None:
    layers, rank, rope, page_size = (rng.randint(1, 5) for _ in range(4))
    mla = MLATokenToKVPool(page_size, page_size, torch.bfloat16, rank, rope, layers)
    dsa = DSATokenToKVPool(page_size, page_size, torch.bfloat16, rank, rope, layers, index_head_dim=128)
    with cpu_simulation():
        pools = MLATokenToKVPoolHost(mla, 1, 0), MLATokenToKVPoolHost(dsa, 1, 0), DSAIndexerPoolHost(dsa, 1, 0)
    latent, sparse, index = (pool.page_bytes for pool in pools)
    assert page_size * latent_token_bytes(layers, rank + rope, "bfloat16") == latent == sparse
    assert page_size * latent_token_bytes(layers, rank + rope, "bfloat16", index_head_dim=128) == sparse + index
    for pool in pools:
        pool.destroy()


def test_a_prompt_keeps_whole_pages_its_windows_last_pages_and_one_state() -> None:
    geometry = ModelGeometry(token_bytes=10, window_bytes=3, window_tokens=20, state_bytes=1000)
    assert geometry.prompt_bytes(15, 16) == 0
    assert geometry.prompt_bytes(16, 16) == 16 * 13 + 1000
    assert geometry.prompt_bytes(100, 16) == 6 * 16 * 10 + 2 * 16 * 3 + 1000


# Configs


def test_config_of_grouped_query_attention() -> None:
    assert geometry_from_config(LLAMA).token_bytes == 32 * 2 * 8 * 128 * 2
    assert geometry_from_config(LLAMA | {"head_dim": 64}).token_bytes == 32 * 2 * 8 * 64 * 2
    assert geometry_from_config(LLAMA, dtype="float8_e4m3fn").token_bytes == 32 * 2 * 8 * 128
    assert geometry_from_config({"text_config": LLAMA, "hidden_size": 1}) == geometry_from_config(LLAMA)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_kv_heads_are_divided_among_ranks_and_copied_where_there_are_fewer(tp: int, heads: int) -> None:
    assert geometry_from_config(LLAMA, tp=tp).token_bytes == 32 * 2 * heads * 128 * 2


def test_config_of_latent_attention_is_whole_on_every_rank() -> None:
    config = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert geometry_from_config(config, tp=8).token_bytes == 32 * 576 * 2
    assert geometry_from_config(config | {"index_head_dim": 128}).token_bytes == 32 * (576 * 2 + 132)


def test_config_of_windows_tells_full_layers_from_windowed_ones() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    config = LLAMA | {"layer_types": kinds, "sliding_window": 1024}
    layer = 2 * 8 * 128 * 2
    expected = ModelGeometry(16 * layer, 16 * layer, 1024)
    assert geometry_from_config(config) == expected
    six = geometry_from_config(LLAMA | {"sliding_window_pattern": 6, "sliding_window": 512})
    assert six == ModelGeometry(5 * layer, 27 * layer, 512)
    shared = geometry_from_config(config | {"num_kv_shared_layers": 4})
    assert shared == ModelGeometry(14 * layer, 14 * layer, 1024)


def test_window_of_unknown_layers_is_counted_as_full_and_said_so() -> None:
    geometry = geometry_from_config(LLAMA | {"sliding_window": 4096})
    assert geometry.token_bytes == geometry_from_config(LLAMA).token_bytes
    assert "all are counted as full" in geometry.notes[0]
    assert geometry_from_config(LLAMA | {"sliding_window": 4096, "use_sliding_window": False}).notes == ()


def test_config_of_recurrent_layers_needs_the_bytes_of_a_state() -> None:
    config = LLAMA | {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}
    with pytest.raises(CapacityError, match="24 recurrent layers; give state_bytes"):
        geometry_from_config(config)
    assert geometry_from_config(config, state_bytes=7) == ModelGeometry(8 * 2 * 8 * 128 * 2, state_bytes=7)


@pytest.mark.parametrize(
    ("fields", "attention"),
    [
        ({"attn_layer_indices": [3, 7]}, 2),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 4),
        ({"mamba_d_state": 16}, 32),
        ({"layers_block_type": ["mamba"] * 30 + ["hybrid"] * 2}, 2),
    ],
)
def test_configs_that_tell_recurrent_layers_in_other_ways(fields: dict[str, Any], attention: int) -> None:
    with pytest.raises(CapacityError, match="recurrent layers; give state_bytes"):
        geometry_from_config(LLAMA | fields)
    assert geometry_from_config(LLAMA | fields, state_bytes=9) == ModelGeometry(attention * 4096, state_bytes=9)


def test_config_whose_full_and_windowed_layers_differ_in_shape() -> None:
    kinds = ["chunked_attention", "indexed_attention"] * 16
    config = LLAMA | {"layer_types": kinds, "attention_chunk_size": 100, "global_head_dim": 512}
    config |= {"num_global_key_value_heads": 4, "head_dim": 64}
    assert geometry_from_config(config, tp=2) == ModelGeometry(16 * 2 * 2 * 512 * 2, 16 * 2 * 4 * 64 * 2, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "config has num_hidden_layers None"),
        ({"num_key_value_heads": "8"}, "config has num_key_value_heads '8'"),
        ({"torch_dtype": None}, "neither dtype nor torch_dtype"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'; one of float32"),
        ({"layer_types": ["full_attention"] * 31}, "lists 31 of 32 layers"),
        ({"layer_types": ["full_attention"] * 31 + ["new"]}, "layers of kind 'new'"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 8}, "needs layers that keep every token"),
    ],
)
def test_config_that_tells_no_geometry_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        geometry_from_config(LLAMA | change)
    with pytest.raises(CapacityError, match="tp is 3; it must divide"):
        geometry_from_config(LLAMA, tp=3)


# Plans


def test_tiers_hold_what_divides_into_them(rng: random.Random) -> None:
    geometry = ModelGeometry(rng.randint(100, 5000))
    page_size, pages = rng.choice([1, 16, 64]), rng.randint(1000, 9000)
    sizes = {"device_bytes": pages * geometry.page_bytes(page_size), "host_bytes": geometry.page_bytes(page_size)}
    plan = plan_capacity(geometry, page_size=page_size, requests_per_second=2.0, prompt_tokens=1000, **sizes)
    assert [(tier.name, tier.pages, tier.tokens) for tier in plan.tiers] == [
        ("L1", pages, pages * page_size),
        ("L2", 1, page_size),
    ]
    assert plan.tiers[0].seconds == pytest.approx(pages * page_size / 2000)
    assert plan.write_back_bytes_per_second == pytest.approx(2.0 * plan.prompt_bytes)


def test_disk_tier_counts_what_the_file_storage_counts(tmp_path: Path, rng: random.Random) -> None:
    layers, heads, page_size, pages = rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 16]), rng.randint(3, 9)
    device_pool = MHATokenToKVPool(pages * page_size, page_size, torch.float16, heads, 32, layers)
    with cpu_simulation():
        host_pool = MHATokenToKVPoolHost(device_pool, 1, 0, page_size)
    storage = FileStorage(tmp_path / "store", fingerprint=Fingerprint("model", revision="1"))
    storage.register_mem_pool_host(host_pool)
    keys = [os.urandom(16) for _ in range(pages)]
    assert all(storage.batch_set(keys, torch.arange(pages * page_size), parents=[None, *keys[:-1]]))
    held = storage.stats().bytes
    storage.close()
    host_pool.destroy()
    geometry = ModelGeometry(attention_token_bytes(layers, heads, 32, "float16"))
    assert disk_prompt_bytes(geometry, pages * page_size, page_size) == held
    plan = plan_capacity(
        geometry, device_bytes=1 << 40, disk_bytes=held, page_size=page_size, prompt_tokens=pages * page_size
    )
    assert [(tier.name, tier.pages) for tier in plan.tiers][1] == ("L3", pages)


def test_loading_is_bytes_over_bandwidth_and_breaks_even_where_prefill_takes_as_long() -> None:
    geometry = ModelGeometry(1000)
    plan = plan_capacity(
        geometry,
        device_bytes=1 << 30,
        page_size=10,
        prompt_tokens=105,
        bus_bytes_per_second=1e6,
        disk_bytes_per_second=0.5e6,
        prefill_tokens_per_second=200.0,
    )
    host, disk = plan.loads
    assert (host.name, host.seconds, host.speedup) == ("L2", pytest.approx(0.1), pytest.approx(5.0))
    assert (disk.name, disk.seconds, disk.speedup) == ("L3", pytest.approx(0.3), pytest.approx(0.5 / 0.3))
    assert plan.recompute_seconds == pytest.approx(0.5)
    assert 100 / host.break_even_tokens_per_second == pytest.approx(host.seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_bytes": 0}, "device_bytes is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"prompt_tokens": 63}, "prompt_tokens is 63; at least a page of 64"),
        ({"bus_bytes_per_second": float("inf")}, "bus_bytes_per_second is inf"),
        ({"requests_per_second": 0.0}, "requests_per_second is 0.0"),
        ({"prefill_tokens_per_second": float("nan")}, "prefill_tokens_per_second is nan"),
    ],
)
def test_arguments_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_capacity(ModelGeometry(8), **({"device_bytes": 1 << 20} | changes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 1000), ("40GB", 40 * 10**9), ("1.5 GiB", 3 << 29), ("2tb", 2 * 10**12), ("3KiB", 3072), ("0", 0)],
)
def test_sizes_have_decimal_and_binary_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 EB", "40 G B", "5iB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(CapacityError, match="size is"):
        parse_bytes(text)


# Traces


def blocks_and_reuse(requests: list[TraceRequest]) -> tuple[int, int, int]:
    """Blocks, blocks that an unbounded prefix cache hits, and blocks of the largest request."""
    seen: set[tuple[int, ...]] = set()
    blocks = hits = 0
    for request in requests:
        prefixes = [request.blocks[: end + 1] for end in range(len(request.blocks))]
        blocks += len(prefixes)
        hits += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return blocks, hits, max(len(request.blocks) for request in requests)


def test_large_tiers_expect_all_the_reuse_a_trace_has(chats: list[TraceRequest]) -> None:
    geometry = ModelGeometry(64)
    plan = plan_capacity(geometry, device_bytes=1 << 40, host_bytes=1 << 40, requests_per_second=1.0)
    found = expected_hits(chats, plan)
    blocks, hits, _ = blocks_and_reuse(chats)
    assert (found.l1, found.l2, found.l3) == (pytest.approx(hits / blocks), 0, 0)
    assert found.tokens == blocks * BLOCK_TOKENS
    assert found.l1 + found.missed == pytest.approx(1)
    rate = trace_means(chats)[1]
    assert rate is not None
    per_request = (blocks - hits) * BLOCK_TOKENS / len(chats)
    assert found.prefill_tokens_per_second == pytest.approx(rate * per_request)


def test_each_tier_adds_hits_and_a_full_disk_tier_ends_them(chats: list[TraceRequest]) -> None:
    blocks, hits, largest = blocks_and_reuse(chats)
    geometry = ModelGeometry(4096)
    block = geometry.page_bytes(BLOCK_TOKENS)
    small = {"device_bytes": largest * block, "host_bytes": largest * block, "page_size": BLOCK_TOKENS}
    footers = BLOCK_TOKENS * 16  # room for each page's footer, in disk blocks

    def found(disk_blocks: int) -> float:
        plan = plan_capacity(geometry, **small, disk_bytes=disk_blocks * (block + footers))
        seen = expected_hits(chats, plan)
        assert seen.l1 + seen.l2 + seen.l3 + seen.missed == pytest.approx(1)
        assert (seen.l3 > 0) <= (disk_blocks > 0)
        return 1 - seen.missed

    without, two_blocks, unbounded = found(0), found(2), found(blocks)
    assert without < unbounded
    assert two_blocks < unbounded
    assert unbounded == pytest.approx(hits / blocks)


def test_trace_that_does_not_fit_is_refused_before_it_starts(chats: list[TraceRequest]) -> None:
    geometry = ModelGeometry(64)
    with pytest.raises(CapacityError, match="host_bytes is 0"):
        expected_hits(chats, plan_capacity(geometry, device_bytes=1 << 40))
    with pytest.raises(CapacityError, match=r"L2 holds \d+ tokens; the largest request"):
        expected_hits(chats, plan_capacity(geometry, device_bytes=1 << 40, host_bytes=64 * BLOCK_TOKENS))


def test_bookkeeping_replay_keeps_its_storage_within_l3_bytes(chats: list[TraceRequest]) -> None:
    largest = blocks_and_reuse(chats)[2]
    options = ReplayOptions(l1_pages=largest, l2_pages=largest, page_size=512, data=False)
    limited = dataclasses.replace(options, l3_bytes=5 * options.page_bytes)
    with Replay(chats, limited) as replay:
        report = replay.run()
        assert replay.storage is not None
        assert 0 < replay.storage.stats().bytes <= limited.l3_bytes
        assert report.paths["L2 to L3"].bytes == 0


# The command


def test_command_plans_from_a_shape_and_writes_the_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = hicache(
        *("--gpu", "40GB", "--host", "512GiB", "--disk", "4TB", "--layers", 32, "--kv-heads", 8, "--head-dim", 128),
        *("--requests-per-second", 2, "--prefill-tokens-per-second", 12000, "--disk-gb-s", 5, "--json", figures),
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(figures.read_text())["plan"]
    assert plan["geometry"]["token_bytes"] == 131072
    assert plan["tiers"][1]["pages"] == 65536
    for shown in ("131,072", "L3", "recomputing", "write-back moves at most"):
        assert shown in result.output


def test_command_reads_a_config_and_a_trace(tmp_path: Path, chats: list[TraceRequest]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"sliding_window": 4096}))
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, chats)
    figures = tmp_path / "figures.json"
    arguments = ("--gpu", "1TB", "--host", "1TB", "--config", tmp_path, "--trace", trace, "--requests", 100)
    result = hicache(*arguments, "--json", figures)
    assert result.exit_code == 0, result.output
    read = json.loads(figures.read_text())
    blocks, hits, _ = blocks_and_reuse(chats[:100])
    assert read["hits"]["l1"] == pytest.approx(hits / blocks)
    assert read["plan"]["prompt_tokens"] == round(np.mean([chat.input_length for chat in chats[:100]]))
    assert "all are counted as full" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "40GB"), "give --config, or --layers with --kv-heads and --head-dim"),
        (("--gpu", "40XB", "--layers", 1, "--latent-dim", 4), "size is '40XB'"),
        (("--gpu", "1GB", "--layers", 1, "--latent-dim", 4, "--tp", 2), "--tp needs --config"),
        (("--gpu", "1GB", "--config", "here.json", "--kv-heads", 2), "--config and --kv-heads are both given"),
        (("--gpu", "1GB", "--config", "/nowhere/config.json"), "/nowhere/config.json: No such file"),
        (("--gpu", "1GB", "--layers", 1, "--latent-dim", 4, "--trace", "/nowhere/t"), "/nowhere/t: No such file"),
    ],
)
def test_command_answers_bad_input_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = hicache(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_help_tells_where_defaults_come_from() -> None:
    # Brackets would be taken for markup, and vanish.
    text = " ".join(re.sub(r"[^\w',.]+", " ", hicache("--help").output).split())
    for default in (
        "by default the config's, else bfloat16",
        "by default the trace's mean, else 4096",
        "as in the trace",
    ):
        assert default in text


def test_command_refuses_a_config_that_is_no_json_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (("{", "that is not JSON"), ("[]", "a JSON object is expected")):
        path.write_text(content)
        result = hicache("--gpu", "1GB", "--config", path)
        assert (result.exit_code, message in result.output) == (2, True)
