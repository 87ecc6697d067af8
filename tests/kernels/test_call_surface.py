"""The existing call surface on CPU memory: bit-exact against indexing, guard bytes, errors that name the tensor."""

import gc
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_kernels import jit_kernel, jit_kernel_reference, reference
from hicache_kernels.pointer_tables import pointer_table, remembered_layers
from hicache_kernels.probe import unavailable_reason

WAYS = pytest.mark.parametrize("calls", [jit_kernel, jit_kernel_reference], ids=["compiled", "torch"])
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    item = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def expected(
    dst: torch.Tensor, dst_indices: torch.Tensor, src: torch.Tensor, src_indices: torch.Tensor
) -> torch.Tensor:
    result = dst.contiguous().view(torch.uint8).clone()
    result[dst_indices.long()] = src.contiguous().view(torch.uint8)[src_indices.long()]
    return result


@st.composite
def copies(draw):
    slots = draw(st.integers(1, 40))
    n = draw(st.integers(0, slots))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return {
        "slots": slots,
        "src_indices": torch.randperm(slots)[:n].to(index_dtype),
        "dst_indices": torch.randperm(slots)[:n].to(draw(st.sampled_from([torch.int32, torch.int64]))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "dim": draw(st.integers(1, 64)) * 4,
        "layers": draw(st.integers(1, 5)),
    }


@WAYS
@given(copies())
@settings(deadline=None, max_examples=60)
def test_one_layer_copies_exactly_the_named_rows(calls, case) -> None:
    k_src, v_src, k_dst, v_dst = (random_bytes(case["slots"], case["dim"], dtype=case["dtype"]) for _ in range(4))
    k_want, v_want = (
        expected(d, case["dst_indices"], s, case["src_indices"]) for d, s in ((k_dst, k_src), (v_dst, v_src))
    )
    calls.transfer_hicache_one_layer(
        k_cache_dst=k_dst,
        v_cache_dst=v_dst,
        indices_dst=case["dst_indices"],
        k_cache_src=k_src,
        v_cache_src=v_src,
        indices_src=case["src_indices"],
        element_dim=case["dim"],
    )
    assert same(k_dst, k_want)
    assert same(v_dst, v_want)


@WAYS
@given(copies())
@settings(deadline=None, max_examples=40)
def test_one_layer_mla_takes_strided_rows_and_leaves_the_gaps(calls, case) -> None:
    src = random_bytes(case["slots"], case["layers"], case["dim"], dtype=case["dtype"])
    dst = random_bytes(case["slots"], case["layers"], case["dim"], dtype=case["dtype"])
    layer = case["layers"] - 1
    want = dst.clone()
    want.view(torch.uint8)[case["dst_indices"].long(), layer] = src.view(torch.uint8)[case["src_indices"].long(), layer]
    calls.transfer_hicache_one_layer_mla(
        dst[:, layer], case["dst_indices"], src[:, layer], case["src_indices"], unroll=4, block_quota=2
    )
    assert same(dst, want)


@WAYS
@given(copies(), st.sampled_from(["layer_first", "page_first"]))
@settings(deadline=None, max_examples=60)
def test_all_layer_follows_tables_and_strides(calls, case, layout: str) -> None:
    item = torch.empty(0, dtype=case["dtype"]).element_size()
    row = case["dim"] * item
    device = [
        [random_bytes(case["slots"], case["dim"], dtype=case["dtype"]) for _ in range(case["layers"])] for _ in "kv"
    ]
    if layout == "layer_first":
        hosts = [random_bytes(case["layers"], case["slots"], case["dim"], dtype=case["dtype"]) for _ in "kv"]
        layers = [[host[i] for i in range(case["layers"])] for host in hosts]
        stride = row
    else:
        hosts = [random_bytes(case["slots"], case["layers"], case["dim"], dtype=case["dtype"]) for _ in "kv"]
        layers = [[host[:, i] for i in range(case["layers"])] for host in hosts]
        stride = row * case["layers"]
    want = [
        [expected(to, case["dst_indices"], of, case["src_indices"]) for to, of in zip(*pair, strict=True)]
        for pair in zip(layers, device, strict=True)
    ]
    calls.transfer_hicache_all_layer(
        k_ptr_dst=pointer_table(layers[0]),
        v_ptr_dst=pointer_table(layers[1]),
        indices_dst=case["dst_indices"],
        k_ptr_src=pointer_table(device[0]),
        v_ptr_src=pointer_table(device[1]),
        indices_src=case["src_indices"],
        kv_cache_src_stride_bytes=row,
        kv_cache_dst_stride_bytes=stride,
        element_size=row,
    )
    for got, wanted in zip(layers, want, strict=True):
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


@WAYS
def test_all_layer_mla_without_element_size_takes_the_common_stride(calls) -> None:
    src = [random_bytes(9, 64) for _ in range(3)]
    dst = [random_bytes(9, 64) for _ in range(3)]
    index = torch.randperm(9)
    tables = {"ptr_dst": pointer_table(dst), "ptr_src": pointer_table(src)}
    calls.transfer_hicache_all_layer_mla(
        **tables, indices_dst=index, indices_src=index, cache_src_stride_bytes=64, cache_dst_stride_bytes=64
    )
    assert all(same(a, b) for a, b in zip(dst, src, strict=True))
    with pytest.raises(ValueError, match="element_size is missing"):
        calls.transfer_hicache_all_layer_mla(
            **tables, indices_dst=index, indices_src=index, cache_src_stride_bytes=64, cache_dst_stride_bytes=128
        )


@WAYS
def test_a_slice_of_a_table_moves_some_layers(calls) -> None:
    src = [random_bytes(6, 32) for _ in range(5)]
    dst = [torch.zeros(6, 32, dtype=torch.uint8) for _ in range(5)]
    index = torch.arange(6)
    with torch.inference_mode():
        calls.transfer_hicache_all_layer_mla(
            pointer_table(dst)[1:3],
            index,
            pointer_table(src)[1:3],
            index,
            cache_src_stride_bytes=32,
            cache_dst_stride_bytes=32,
        )
    assert [same(a, b) for a, b in zip(dst, src, strict=True)] == [False, True, True, False, False]


def test_a_table_keeps_its_tensors_alive_and_lets_them_go() -> None:
    table = pointer_table([torch.full((2, 4), 7, dtype=torch.uint8)])
    part = table[:1]
    del table
    gc.collect()
    layers = remembered_layers("table", part)
    assert layers is not None
    assert layers.tensors[0].data_ptr() == part.tolist()[0]
    assert remembered_layers("table", part.clone()) is None


def staged_case(pages: int, staging_pages: int, *, page_size: int = 4, layers: int = 3, interleaved: bool = False):
    total = pages + 3
    shape = (total * page_size, layers, 2, 8)
    if interleaved:
        joint = random_bytes(total * page_size, layers, 2, 2, 8, dtype=torch.bfloat16)
        dst = {"dst_k": joint[:, :, 0], "dst_v": joint[:, :, 1]}
    else:
        dst = {name: random_bytes(*shape, dtype=torch.bfloat16) for name in ("dst_k", "dst_v")}
    src = [[random_bytes(total * page_size, 2, 8, dtype=torch.bfloat16) for _ in range(layers)] for _ in "kv"]
    slots = torch.arange(page_size)
    indices = [
        (torch.randperm(total)[:pages, None] * page_size + slots).reshape(-1) for _ in ("src_indices", "dst_indices")
    ]
    staging = {
        name: torch.empty(staging_pages * page_size, layers, 2, 8, dtype=torch.bfloat16)
        for name in ("staging_k", "staging_v")
    }
    return src, dst, indices, staging


@WAYS
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("pages", "staging_pages"), [(0, 2), (1, 8), (7, 8), (8, 8), (9, 8), (17, 8), (5, 1)])
def test_staged_pages_land_exactly_whatever_the_staging_holds(
    calls, pages: int, staging_pages: int, page_size: int, interleaved: bool
) -> None:
    src, dst, (src_indices, dst_indices), staging = staged_case(
        pages, staging_pages, page_size=page_size, interleaved=interleaved
    )
    want = {name: buffer.clone() for name, buffer in dst.items()}
    for buffer, layers in zip(want.values(), src, strict=True):
        for layer, rows in enumerate(layers):
            buffer[dst_indices, layer] = rows[src_indices]
    calls.transfer_hicache_all_layer_staged_lf_pf(
        pointer_table(src[0]),
        pointer_table(src[1]),
        src_indices,
        dst_indices,
        staging["staging_k"],
        staging["staging_v"],
        dst["dst_k"],
        dst["dst_v"],
        page_size=page_size,
    )
    assert all(same(dst[name], want[name]) for name in dst)


@WAYS
def test_staged_mla_moves_one_buffer(calls) -> None:
    src, dst, (src_indices, dst_indices), staging = staged_case(5, 2)
    want = dst["dst_k"].clone()
    for layer, rows in enumerate(src[0]):
        want[dst_indices, layer] = rows[src_indices]
    calls.transfer_hicache_all_layer_mla_staged_lf_pf(
        pointer_table(src[0]),
        src_indices.int(),
        dst_indices,
        staging["staging_k"],
        dst["dst_k"],
        page_size=4,
        element_size=32,
        unroll=1,
        block_quota=3,
    )
    assert same(dst["dst_k"], want)


def test_signatures_are_those_that_engines_call() -> None:
    keywords = ["unroll", "block_quota", "page_size"]
    strides = ["kv_cache_src_stride_bytes", "kv_cache_dst_stride_bytes", "element_size"]
    wanted = {
        "transfer_hicache_one_layer": (
            ["k_cache_dst", "v_cache_dst", "indices_dst", "k_cache_src", "v_cache_src", "indices_src"],
            ["element_dim", *keywords],
        ),
        "transfer_hicache_one_layer_mla": (
            ["cache_dst", "indices_dst", "cache_src", "indices_src"],
            ["element_dim", *keywords],
        ),
        "transfer_hicache_all_layer": (
            ["k_ptr_dst", "v_ptr_dst", "indices_dst", "k_ptr_src", "v_ptr_src", "indices_src"],
            [*strides, *keywords],
        ),
        "transfer_hicache_all_layer_mla": (
            ["ptr_dst", "indices_dst", "ptr_src", "indices_src"],
            [name.removeprefix("kv_") for name in strides] + keywords,
        ),
        "can_use_hicache_jit_kernel": ([], ["element_size", *keywords]),
        "can_use_write_back_jit_kernel": ([], ["element_size", "unroll", "block_quota"]),
    }
    for name, (positional, keyword) in wanted.items():
        parameters = inspect.signature(jit_kernel.__dict__[name]).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional, name
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keyword, name


def one_layer(**changes):
    arguments = {name: random_bytes(8, 16) for name in ("k_cache_dst", "v_cache_dst", "k_cache_src", "v_cache_src")}
    arguments |= {"indices_dst": torch.arange(4), "indices_src": torch.arange(4)}
    before = {name: value.clone() for name, value in arguments.items()}
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        jit_kernel.transfer_hicache_one_layer(**(arguments | changes))
    assert all(torch.equal(arguments[name], before[name]) for name in arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", ["indices_dst", "indices_src"])
def test_errors_name_the_indices(name: str) -> None:
    assert name in one_layer(**{name: torch.tensor([0, 1, 2, 8])})
    assert "8; rows of k_cache" in one_layer(**{name: torch.tensor([0, 1, 2, 8])})
    assert f"{name} contains -1" in one_layer(**{name: torch.tensor([0, -1, 2, 3], dtype=torch.int32)})
    assert f"{name} has dtype torch.float32" in one_layer(**{name: torch.zeros(4)})
    assert f"{name} has shape (2, 2)" in one_layer(**{name: torch.zeros(2, 2, dtype=torch.int64)})
    assert f"{name} {'has ' if name == 'indices_dst' else ''}3" in one_layer(**{name: torch.arange(3)})
    assert f"{name} has 4 entries, no multiple of page_size 3" in one_layer(
        **{
            name: torch.arange(4),
            "page_size": 3,
            ("indices_src" if name == "indices_dst" else "indices_dst"): torch.arange(3),
        }
    )


@pytest.mark.parametrize("name", ["k_cache_dst", "v_cache_dst", "k_cache_src", "v_cache_src"])
def test_errors_name_the_cache(name: str) -> None:
    assert name in one_layer(**{name: random_bytes(8, 32)[:, ::2], "element_dim": 16})
    assert name in one_layer(**{name: random_bytes(7, 24), "element_dim": 16})
    assert name in one_layer(**{name: random_bytes(8, 32).view(torch.bfloat16), "element_dim": 16})
    assert name in one_layer(**{name: torch.tensor(1)})
    assert name in one_layer(**{name: random_bytes(8 * 16 + 1)[1:].view(8, 16)})


def test_rows_that_are_no_multiple_of_four_bytes_are_refused() -> None:
    caches = {name: random_bytes(8, 6) for name in ("k_cache_dst", "v_cache_dst", "k_cache_src", "v_cache_src")}
    assert "multiple of 4" in one_layer(**caches)


def test_a_quota_of_no_cta_is_refused() -> None:
    assert "block_quota is 0" in one_layer(block_quota=0)


def test_staged_errors_name_the_tensor() -> None:
    def call(**changes) -> str:
        src, dst, (src_indices, dst_indices), staging = staged_case(3, 2)
        arguments = {
            "k_ptr_src": pointer_table(src[0]),
            "v_ptr_src": pointer_table(src[1]),
            "src_indices": src_indices,
            "dst_indices": dst_indices,
            **staging,
            **dst,
            "page_size": 4,
        }
        for name, change in changes.items():
            arguments[name] = change(arguments[name])
        with pytest.raises((TypeError, ValueError, IndexError)) as caught:
            jit_kernel.transfer_hicache_all_layer_staged_lf_pf(**arguments)
        return str(caught.value)

    assert "dst_indices is torch.int32" in call(dst_indices=lambda t: t.int())
    assert "dst_indices must name whole pages" in call(dst_indices=lambda t: t.flip(0))
    assert "src_indices must name whole pages" in call(src_indices=lambda t: t.flip(0))
    assert "dst_indices contains" in call(dst_indices=lambda t: t + 400)
    assert "src_indices has 8 entries, dst_indices 12" in call(src_indices=lambda t: t[:8])
    assert "staging_v holds 3 slots" in call(staging_v=lambda t: t[:3])
    assert "dst_v has shape" in call(dst_v=lambda t: t[:, :2])
    assert "staging_v has elements of 32 bytes" in call(staging_k=lambda t: t[:, :, :1])
    assert "staging_k has strides" in call(staging_k=lambda t: torch.cat([t, t], 1)[:, :3])
    assert "v_ptr_src has dtype" in call(v_ptr_src=lambda t: t.to(torch.float32))
    assert "k_ptr_src" in call(k_ptr_src=lambda t: t[:2])
    assert "page_size is 0" in call(page_size=lambda _: 0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules as they are on a machine that has them, whatever this one has."""
    monkeypatch.setattr(jit_kernel, "unavailable_reason", lambda *_: None)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [4, 16, 20, 48, 576, 1152])
def test_the_main_module_takes_any_multiple_of_four(size: int) -> None:
    assert jit_kernel.can_use_hicache_jit_kernel(element_size=size, unroll=2, block_quota=4, page_size=64)
    assert jit_kernel.can_use_write_back_jit_kernel(element_size=size, unroll=2, block_quota=4) == (size % 16 == 0)


def test_probes_report_what_the_loader_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_kernel, "unavailable_reason", lambda *_: "no compiler")
    assert not jit_kernel.can_use_hicache_jit_kernel(element_size=128)
    assert not jit_kernel.can_use_write_back_jit_kernel(element_size=128)


def foreign(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def test_a_foreign_table_needs_a_compiled_build_and_says_so() -> None:
    src, dst = ([random_bytes(9, 64) for _ in range(3)] for _ in range(2))
    before = [tensor.clone() for tensor in dst]
    index = torch.randperm(9)
    strides = {"cache_src_stride_bytes": 64, "cache_dst_stride_bytes": 64}
    with pytest.raises(RuntimeError, match=r"ptr_src is a foreign pointer table.*pointer_table"):
        jit_kernel_reference.transfer_hicache_all_layer_mla(pointer_table(dst), index, foreign(src), index, **strides)
    assert all(torch.equal(a, b) for a, b in zip(dst, before, strict=True))
    if unavailable_reason("main", "cpu") is None:
        jit_kernel.transfer_hicache_all_layer_mla(foreign(dst), index, foreign(src), index, **strides)
        assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))


def test_a_missing_module_means_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_kernels.row_copy.load_module", lambda *_: None)
    src, dst = ([random_bytes(9, 64) for _ in range(3)] for _ in range(2))
    index = torch.randperm(9)
    strides = {"cache_src_stride_bytes": 64, "cache_dst_stride_bytes": 64}
    jit_kernel.transfer_hicache_all_layer_mla(pointer_table(dst), index, pointer_table(src), index, **strides)
    assert all(torch.equal(a, b) for a, b in zip(dst, src, strict=True))
    with pytest.raises(RuntimeError, match="ptr_dst is a foreign pointer table"):
        jit_kernel.transfer_hicache_all_layer_mla(foreign(dst), index, pointer_table(src), index, **strides)


def test_refused_sizes_are_logged_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    jit_kernel._log_refusal.cache_clear()
    for _ in range(3):
        assert not jit_kernel.can_use_write_back_jit_kernel(element_size=20)
        assert not jit_kernel.can_use_hicache_jit_kernel(element_size=6)
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "20 bytes" in m and "multiple of 16" in m]) == 1
    assert len([m for m in messages if "6 bytes" in m and "multiple of 4" in m]) == 1


def test_the_reference_offers_every_call() -> None:
    calls = [name for name in vars(jit_kernel) if name.startswith("transfer_hicache_")]
    assert len(calls) == 6
    assert all(getattr(reference, name) is getattr(jit_kernel_reference, name) for name in calls)
