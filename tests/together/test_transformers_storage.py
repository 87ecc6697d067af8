"""The prefix cache of transformers over storage: another process, other keys, pieces, and interruptions."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.conftest import in_child
from tests.together import transformers_families as fam

from hicache_controller.integrations.transformers import HiCache, Hit, matching
from hicache_controller.storage_tasks import PrefetchOperation

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
PREFIX = 8 * fam.PAGE


def test_a_killed_process_leaves_a_warm_storage_and_nothing_wrong(tmp_path: Path, models: dict[str, Any]) -> None:
    families = ("llama", "gemma3", "qwen3_next")
    first, second = fam.forked_prompts(PREFIX)
    torch.save(first, tmp_path / "prompt")
    # The second prompt of each model is killed while it is on its way.
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, transformers_families as fam
from hicache_controller.integrations.transformers import HiCache
prompt = torch.load({str(tmp_path / "prompt")!r})
for family in {families!r}:
    model = fam.make_model(family, seed=1)
    cache = HiCache.for_model(
        model, model_id=family, l2_gb=0.02, page_size=fam.PAGE, storage={str(tmp_path / "pages")!r}
    )
    fam.keep(cache, prompt, {PREFIX})
    cache.flush()
    fam.keep(cache, fam.random_tokens(300), 296)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    for family in families:
        model = models.setdefault(family, fam.make_model(family, seed=1))
        prefix = fam.compute_prefix(model, first[:, :PREFIX])
        tokens, logits = fam.continuation(model, second[:, PREFIX:], prefix.cache())
        options = {"model_id": family, "l2_gb": 0.02, "page_size": fam.PAGE, "storage": tmp_path / "pages"}
        with HiCache.for_model(model, **options) as cache, cache.session(second, checkpoints=()) as past:
            assert past.hits[0].storage == past.cached_tokens == PREFIX
            chosen, seen = fam.continuation(model, second[:, PREFIX:], past)
        assert chosen == tokens
        assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True))


@pytest.mark.parametrize("change", ["weight", "buffer", "dtype", "revision", "model_id", "configuration", "page_size"])
def test_what_changes_the_keys_makes_every_stored_page_a_miss(change: str, tmp_path: Path) -> None:
    prompt = fam.random_tokens(40)
    options: dict[str, Any] = {"model_id": "tiny", "revision": "a", "page_size": fam.PAGE}

    def hit(model: Any, options: dict[str, Any]) -> int:
        with HiCache.for_model(model, l2_gb=0.02, storage=tmp_path, **options) as cache:
            with cache.session(prompt) as past:
                found = past.cached_tokens
                fam.forward(model, prompt[:, found:], past)
            cache.flush()
        return found

    model = fam.make_model("llama", seed=5)
    assert hit(model, options) == 0
    assert hit(fam.make_model("llama", seed=5), options) == 32
    other = fam.make_model("llama", seed=5)
    with torch.no_grad():
        if change == "weight":
            other.model.layers[2].self_attn.k_proj.weight[3, 5] += 1e-6
        elif change == "buffer":
            other.model.rotary_emb.inv_freq[1] *= 1.0001
        elif change == "dtype":
            other = other.to(torch.bfloat16)
        elif change == "configuration":
            other.config.rms_norm_eps *= 2
    changed = {"revision": {"revision": "b"}, "model_id": {"model_id": "huge"}, "page_size": {"page_size": 4}}
    assert hit(other, options | changed.get(change, {})) == 0
    assert hit(model, options) == 32


def test_a_forked_child_can_neither_use_nor_close_the_cache_of_its_parent(tmp_path: Path) -> None:
    model, prompt = fam.make_model("llama", seed=5), fam.random_tokens(40)
    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 32)
        session = cache.session(prompt)
        with session as past:
            assert past.cached_tokens == 32
            for use in (
                lambda: cache.session(prompt),
                lambda: cache.flush(),
                lambda: cache.close(),
                lambda: cache.__exit__(None, None, None),
                lambda: session.__exit__(None, None, None),
            ):
                assert "was made before a fork" in in_child(use)
            fam.forward(model, prompt[:, 32:], past)
        cache.flush()
    with fam.open_cache(model, storage=tmp_path) as cache, cache.session(prompt) as past:
        assert past.cached_tokens == past.hits[0].storage == 32


@pytest.mark.parametrize(("step_pages", "pieces"), [(3, 3), (5, 2), (100, 1)])
def test_a_long_prefix_comes_from_storage_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_pages: int, pieces: int
) -> None:
    page_bytes = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    monkeypatch.setattr(matching, "STORAGE_STEP_BYTES", step_pages * page_bytes)
    model = fam.make_model("llama", seed=10)
    prompt = fam.random_tokens(11 * fam.PAGE + 4)
    prefix = fam.compute_prefix(model, prompt[:, : 11 * fam.PAGE])
    expected = fam.continuation(model, prompt[:, 11 * fam.PAGE :], prefix.cache())
    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt[:, : 2 * fam.PAGE + 1], 2 * fam.PAGE)
    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 11 * fam.PAGE)
    with fam.open_cache(model, storage=tmp_path) as cache:
        with cache.session(prompt[:, : 2 * fam.PAGE + 1]) as past:
            fam.forward(model, prompt[:, 2 * fam.PAGE : 2 * fam.PAGE + 1], past)
        fetched: list[int] = []
        prefetch = cache.tiers.controller.prefetch
        monkeypatch.setattr(
            cache.tiers.controller,
            "prefetch",
            lambda slots, keys, **options: fetched.append(len(keys)) or prefetch(slots, keys, **options),
        )
        with cache.session(prompt) as past:
            assert past.hits[0] == Hit(11 * fam.PAGE, device=2 * fam.PAGE, storage=9 * fam.PAGE)
            assert (len(fetched), sum(fetched)) == (pieces, 9)
            chosen, seen = fam.continuation(model, prompt[:, 11 * fam.PAGE :], past)
        fam.check(cache)
    assert chosen == expected[0]
    for mine, its in zip(seen, expected[1], strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("where", ["lookup", "wait"])
def test_a_session_interrupted_while_it_fetches_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(matching, "STORAGE_STEP_BYTES", 1)
    model = fam.make_model("llama", seed=10)
    prompt = fam.random_tokens(9 * fam.PAGE + 4)
    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 9 * fam.PAGE)
    with fam.open_cache(model, storage=tmp_path) as cache:
        calls: list[str] = []
        owner, name = (cache.tiers.controller, "storage_exists") if where == "lookup" else (PrefetchOperation, "wait")
        real = getattr(owner, name)

        def interrupt(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.session(prompt).__enter__()
        fam.check(cache)
        with cache.session(prompt) as past:
            assert past.hits[0].tokens == 9 * fam.PAGE
        fam.check(cache)
        cache.drop_device()
        tree, pool = cache.tiers.tree, cache.tiers.controller.mem_pool_host
        tree.evict_host(tree.stats().host_pages)
        cache.flush()
        assert (tree.stats().host_pages, pool.available_size()) == (0, pool.size)


def test_a_prompt_in_storage_that_is_longer_than_the_device_tier_is_loaded_in_part(tmp_path: Path) -> None:
    model = fam.make_model("llama", seed=7)
    page = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    prompt = fam.random_tokens(100)
    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, prompt, 96)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with fam.open_cache(model, storage=tmp_path, l1_gb=6.5 * page / 1e9) as cache, cache.session(prompt) as past:
        assert past.hits[0] == Hit(48, storage=48)
        output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, expected)


def test_a_session_ends_while_another_one_loads_the_same_prefix() -> None:
    model = fam.make_model("llama", seed=11)
    shared = fam.random_tokens(8 * fam.PAGE + 3)
    longer = torch.cat([shared, fam.random_tokens(2 * fam.PAGE)], 1)
    with fam.open_cache(model) as cache:
        pool, gate = cache.tiers.group.anchor_entry.host_pool, threading.Event()
        with cache.session(longer) as past:  # nothing is cached yet
            fam.forward(model, longer, past)
            fam.keep(cache, shared, 8 * fam.PAGE)
            fam.evict(cache)
            load = pool.load_to_device_per_layer

            def late(*arguments: Any, **options: Any) -> Any:
                gate.wait()
                return load(*arguments, **options)

            pool.load_to_device_per_layer = late
            loading = cache.session(shared)
            loading.__enter__()
            assert cache.tiers.tree._transfers.loads
            # The other session ends only once this load does, which it waits for.
            settle = cache.tiers.tree.settle
            cache.tiers.tree.settle = lambda match: gate.set() or settle(match)
        gate.set()
        loading.__exit__(fam.LeftError, fam.LeftError(), None)
        fam.check(cache)
        with cache.session(longer) as past:
            assert past.cached_tokens == 10 * fam.PAGE
