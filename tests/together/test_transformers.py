"""The prefix cache of transformers: what is restored equals what never left the device, bit for bit."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam

from hicache_controller import Namespace
from hicache_controller.integrations.transformers import HiCache
from hicache_controller.integrations.transformers.tiers import MIN_CHECKPOINTS

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
PREFIX = 8 * fam.PAGE


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_continuing_from_every_tier_equals_continuing_from_the_device_cache(model: Any, tmp_path: Path) -> None:
    first, second = fam.forked_prompts(PREFIX)
    prefix = fam.compute_prefix(model, first[:, :PREFIX])
    tokens, logits = fam.continuation(model, second[:, PREFIX:], prefix.cache())

    def check_continuation(cache: HiCache, tier: str) -> None:
        # What is left with an error keeps nothing, so the next tier's hit is the same.
        with contextlib.suppress(fam.LeftError), cache.session(second, checkpoints=()) as past:
            assert past.get_seq_length() == past.cached_tokens == PREFIX
            assert past.hits[0].tokens == getattr(past.hits[0], tier) == PREFIX
            chosen, seen = fam.continuation(model, second[:, PREFIX:], past)
            assert chosen == tokens
            assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True))
            raise fam.LeftError
        fam.check(cache)

    with fam.open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, first, PREFIX)
        check_continuation(cache, "device")
        fam.evict(cache)
        check_continuation(cache, "host")
    with fam.open_cache(model, storage=tmp_path) as cache:
        check_continuation(cache, "storage")


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_the_next_turn_of_a_chat_computes_only_what_is_new(model: Any) -> None:
    question = fam.random_tokens(29)
    with fam.open_cache(model) as cache:
        with cache.session(question) as past:
            answer = model.generate(question, past_key_values=past, max_new_tokens=15, do_sample=False)
        assert torch.equal(answer, model.generate(question, max_new_tokens=15, do_sample=False))
        following = torch.cat([answer, fam.random_tokens(6)], 1)
        with cache.session(following, checkpoints=()) as past:
            # The last token was chosen and never run, so 43 tokens have keys: five pages.
            assert past.cached_tokens == 40
            fam.forward(model, following[:, 40:], past)
        fam.check(cache)


def test_a_batch_with_different_prefixes_continues_from_the_column_all_reach() -> None:
    model = fam.make_model("llama", seed=3)
    short, long = fam.random_tokens(45), fam.random_tokens(61)
    ids = torch.cat([torch.nn.functional.pad(short, (16, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :16] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    with fam.open_cache(model) as cache:
        for prompt in (short[:, :30], long):
            with cache.session(prompt) as past:
                fam.forward(model, prompt, past)
        with cache.session(ids, attention_mask=mask) as past:
            # 24 tokens of the short prompt and 56 of the long one; columns count 16 of padding.
            assert past.cached_tokens == 16 + 24
            assert [hit.tokens for hit in past.hits] == [24, 40]
            output = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=8, do_sample=False)
        assert torch.equal(output, expected)
        fam.check(cache)
        with cache.session(output[:1, 16:]) as past:
            assert past.cached_tokens == 48
            fam.forward(model, output[:1, 64:], past)


def test_a_batch_cut_inside_a_page_restores_the_same_bits() -> None:
    model = fam.make_model("llama", seed=3)
    short, long = fam.random_tokens(45), fam.random_tokens(58)
    ids = torch.cat([torch.nn.functional.pad(short, (13, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    with fam.open_cache(model) as cache:
        for prompt in (short, long):
            with cache.session(prompt) as past:
                fam.forward(model, prompt, past)
                kept = past.layers[1].keys.clone()
            if prompt is short:
                first = kept
        with cache.session(ids, attention_mask=mask) as past:
            assert past.cached_tokens == 13 + 40
            assert [hit.tokens for hit in past.hits] == [40, 53]
            for layer in past.layers:
                layer.fill()
            assert torch.equal(past.layers[1].keys[0, :, 13:], first[0, :, :40])
            assert torch.equal(past.layers[1].keys[1], kept[0, :, :53])
            assert not past.layers[1].keys[0, :, :13].any()


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1", "qwen3_next"], indirect=True)
def test_a_batch_of_windows_and_states_continues_where_every_sequence_can(model: Any) -> None:
    ids = fam.random_tokens(40, batch=2)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with fam.open_cache(model) as cache:
        for row in ids:
            with cache.session(row[None], checkpoints=[16, 32]) as past:
                fam.forward(model, row[None, past.get_seq_length() :], past)
        with cache.session(ids[:1, :25], checkpoints=[24]) as past:
            fam.forward(model, ids[:1, past.get_seq_length() : 25], past)
        # The windows saved at 16 and 32 make up the one at 24; states do not.
        cut = 24 if type(model).__name__.startswith("Gemma") else 16
        for prompts, reached in ((ids, 32), (ids[:, :25], cut)):
            with cache.session(prompts, checkpoints=()) as past:
                assert past.cached_tokens == reached
                output = model.generate(prompts, past_key_values=past, max_new_tokens=4, do_sample=False)
            if prompts is ids:
                assert torch.equal(output, expected)
        longer = fam.random_tokens(43)
        with cache.session(longer, checkpoints=[16, 32]) as past:
            fam.forward(model, longer[:, past.get_seq_length() :], past)
        both = torch.cat([torch.nn.functional.pad(ids[:1], (3, 0)), longer])
        shown = torch.ones_like(both)
        shown[0, :3] = 0
        with cache.session(both, attention_mask=shown, checkpoints=()) as past:
            assert past.cached_tokens == 0
            model.generate(both, attention_mask=shown, past_key_values=past, max_new_tokens=2, do_sample=False)
        fam.check(cache)


@pytest.mark.parametrize("model", ["llama", "mistral", "falcon_h1", "deepseek_v32"], indirect=True)
def test_leaving_with_an_error_keeps_nothing_and_gives_every_page_back(model: Any) -> None:
    prompt = fam.random_tokens(50)
    with fam.open_cache(model) as cache:
        free = cache.tiers.tree.device_allocator.available_pages
        with contextlib.suppress(fam.LeftError), cache.session(prompt) as past:
            model.generate(prompt, past_key_values=past, max_new_tokens=10, do_sample=False)
            raise fam.LeftError
        assert cache.stats().device_tokens == cache.stats().host_tokens == 0
        assert cache.tiers.tree.device_allocator.available_pages == free
        for name, _ in cache.tiers.windowed_pools:
            assert cache.tiers.tree.window_stats(name) == (0, 0)
            entry = cache.tiers.group.get_entry(name)
            everything = entry.device_alloc_fn(entry.device_pool.size)
            assert everything is not None
            entry.device_free_fn(everything)
        assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3", "falcon_h1"], indirect=True)
def test_random_sessions_in_small_tiers_always_give_what_computing_anew_gives(model: Any, tmp_path: Path) -> None:
    fam.check_random_sessions(model, tmp_path, rounds=30)


@pytest.mark.parametrize("model", ["gemma3", "mistral", "qwen3_next"], indirect=True)
def test_where_prompts_part_a_window_or_state_is_saved_for_the_third(model: Any) -> None:
    document = fam.random_tokens(60)
    with fam.open_cache(model) as cache:
        for cached in (0, 0, 56):
            prompt = torch.cat([document, fam.random_tokens(30)], 1)
            expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
            with cache.session(prompt) as past:
                assert past.cached_tokens == cached
                output = model.generate(prompt, past_key_values=past, max_new_tokens=3, do_sample=False)
            assert torch.equal(output, expected)
        fam.check(cache)


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1"], indirect=True)
def test_a_checkpoint_at_the_very_end_leaves_a_token_to_generate_from(model: Any) -> None:
    prompt = fam.random_tokens(40)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with fam.open_cache(model) as cache:
        with cache.session(prompt, checkpoints=[40, 1000]) as past:
            output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
        assert torch.equal(output, expected)
        with cache.session(output) as past:
            assert past.cached_tokens == 40
            fam.forward(model, output[:, 40:], past)


@pytest.mark.parametrize("model", ["gemma3", "mistral"], indirect=True)
def test_the_window_at_the_end_of_a_long_pass_is_saved(model: Any) -> None:
    prompt = fam.random_tokens(600)
    with fam.open_cache(model) as cache:
        with cache.session(prompt, checkpoints=()) as past:
            fam.forward(model, prompt, past)
        with cache.session(torch.cat([prompt, fam.random_tokens(3)], 1), checkpoints=()) as past:
            assert past.cached_tokens == 600
            fam.forward(model, fam.random_tokens(3), past)
        middle = fam.random_tokens(303)
        with cache.session(middle, checkpoints=()) as past:
            fam.forward(model, middle, past)
        with cache.session(torch.cat([middle, fam.random_tokens(9)], 1), checkpoints=()) as past:
            assert past.cached_tokens == 296
            fam.forward(model, fam.random_tokens(16), past)


@pytest.mark.parametrize("model", ["llama", "gemma3", "falcon_h1"], indirect=True)
def test_sessions_that_take_turns_do_not_mix(model: Any) -> None:
    first, second = fam.random_tokens(45), fam.random_tokens(45)
    second[:, :20] = first[:, :20]
    with fam.open_cache(model) as cache:
        with cache.session(first, checkpoints=[16]) as past:
            fam.forward(model, first[:, past.get_seq_length() :], past)
        fam.evict(cache)
        with cache.session(first, checkpoints=()) as one, cache.session(second, checkpoints=()) as other:
            # The first prompt's own end has states only where its last forward pass ended, which was inside a page.
            assert (one.cached_tokens, other.cached_tokens) == (
                16 if model.config.model_type == "falcon_h1" else 40,
                16,
            )
            for prompt, past in ((first, one), (second, other)):
                begin = int(past.get_seq_length())
                fam.forward(model, prompt[:, begin : begin + 3], past)
            for prompt, past in ((second, other), (first, one)):
                logits = fam.forward(model, prompt[:, past.get_seq_length() :], past)
                fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
                torch.testing.assert_close(logits[:, -1], fresh[:, -1])
        fam.evict(cache)
        for prompt in (first, second):
            with cache.session(prompt, checkpoints=()) as past:
                logits = fam.forward(model, prompt[:, past.get_seq_length() :], past)
                fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
                torch.testing.assert_close(logits[:, -1], fresh[:, -1])
        fam.check(cache)


def test_a_model_without_a_head_is_served_as_well() -> None:
    model = fam.make_model("qwen3", seed=12).model
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache, torch.no_grad():
        hidden = []
        for cached in (0, 40):
            with cache.session(prompt) as past:
                assert past.cached_tokens == cached
                output = model(prompt[:, cached:], use_cache=True, **{cache.cache_argument: past})
                hidden.append(output.last_hidden_state[:, -5:])
            fam.evict(cache)
    torch.testing.assert_close(hidden[1], hidden[0])


def test_namespaces_do_not_share_prefixes() -> None:
    model = fam.make_model("llama", seed=6)
    prompt = fam.random_tokens(33)
    with fam.open_cache(model) as cache:
        for namespace, cached in (
            (Namespace(adapter="a"), 0),
            (Namespace(adapter="b"), 0),
            (Namespace(adapter="a"), 32),
        ):
            with cache.session(prompt, namespace=namespace) as past:
                assert past.cached_tokens == cached
                fam.forward(model, prompt[:, cached:], past)


def test_a_prompt_longer_than_the_device_tier_is_cached_in_part() -> None:
    model = fam.make_model("llama", seed=7)
    page = 2 * 2 * 8 * 4 * 3 * fam.PAGE
    prompt = fam.random_tokens(100)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with HiCache.for_model(model, model_id="x", l1_gb=6.5 * page / 1e9, l2_gb=0.01, page_size=fam.PAGE) as cache:
        for cached in (0, 48, 48):
            with cache.session(prompt) as past:
                assert past.cached_tokens == cached
                output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
            assert torch.equal(output, expected)
            fam.check(cache)


def test_compiled_steps_follow_a_restored_prefix() -> None:
    model = fam.make_model("llama", seed=11)
    prompt = fam.random_tokens(45)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt, 40)
        fam.evict(cache)
        with cache.session(prompt, max_cache_len=64) as past, torch.no_grad():
            assert past.cached_tokens == 40
            chosen = [fam.forward(model, prompt[:, 40:], past)[:, -1:].argmax(-1)]
            for position in range(45, 48):
                options = {"position_ids": torch.tensor([[position]]), cache.cache_argument: past}
                logits = step(input_ids=chosen[-1], use_cache=True, **options).logits
                chosen.append(logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat([prompt, *chosen], 1), expected)


@pytest.mark.parametrize("model", ["gemma3", "qwen3_next"], indirect=True)
def test_a_checkpoint_after_the_end_of_the_device_tier_is_not_kept_for_another_place(model: Any) -> None:
    prompt = fam.random_tokens(100)
    with fam.open_cache(model) as cache:
        tiers = cache.tiers
        page_bytes = {str(entry.name): entry.host_pool.page_bytes for entry in tiers.group.entries}
    checkpoint = page_bytes.get("swa", 0) * tiers.window_pages + page_bytes.get("mamba", 0)
    size = MIN_CHECKPOINTS * checkpoint + 7.5 * page_bytes["kv"]
    with fam.open_cache(model, l1_gb=size / 1e9) as cache:
        assert cache.stats().device_capacity == 7 * fam.PAGE
        for cached in (0, 24):
            with cache.session(prompt, checkpoints=[24, 96]) as past:
                assert past.hits[0].tokens == cached
                fam.forward(model, prompt[:, past.get_seq_length() :], past)
            fam.check(cache)
        with cache.session(prompt, checkpoints=()) as past:
            logits = fam.forward(model, prompt[:, 24:], past)
        fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
        torch.testing.assert_close(logits, fresh[:, 24:])


@pytest.mark.parametrize("model", ["llama", "gemma3", "mistral"], indirect=True)
def test_what_was_cropped_and_computed_otherwise_is_not_served(model: Any) -> None:
    prompt, other = fam.random_tokens(40), fam.random_tokens(20)
    with fam.open_cache(model) as cache:
        with cache.session(prompt, checkpoints=[16, 32]) as past:
            fam.forward(model, prompt, past)
            past.crop(-16)
            fam.forward(model, other, past)
        turned = torch.cat([prompt[:, :24], other], 1)
        for tokens, cached in ((prompt[:, :36], 24), (turned[:, :38], 32), (turned, 40)):
            with contextlib.suppress(fam.LeftError), cache.session(tokens, checkpoints=()) as past:
                # The window saved at 32 was that of the old tokens; what is served is the one saved at 40, cut.
                assert past.cached_tokens == cached
                logits = fam.forward(model, tokens[:, past.cached_tokens :], past)
                fresh = fam.forward(model, tokens, fam.DynamicCache(config=model.config))
                torch.testing.assert_close(logits, fresh[:, -logits.shape[1] :])
                raise fam.LeftError
        fam.check(cache)


def test_a_static_cache_keeps_the_prompt_and_gives_the_same_tokens() -> None:
    model = fam.make_model("qwen3", seed=9)
    prompt = fam.random_tokens(45)
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)
    with fam.open_cache(model) as cache:
        for tier in ("computed", "device", "host"):
            if tier == "host":
                fam.evict(cache)
            with cache.session(prompt, max_cache_len=64) as past:
                assert past.cached_tokens == (0 if tier == "computed" else 40)
                assert torch.equal(
                    model.generate(prompt, past_key_values=past, max_new_tokens=9, do_sample=False), expected
                )
            assert not model.get_decoder()._forward_pre_hooks
        assert cache.stats().host_tokens == 40
        with pytest.raises(ValueError, match="max_cache_len is 45"), cache.session(prompt, max_cache_len=45):
            pass


@pytest.mark.parametrize("model", ["llama", "gemma3", "falcon_h1", "deepseek_v32"], indirect=True)
def test_each_layer_is_waited_for_and_no_later_one(
    model: Any, harmless_hooks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = fam.random_tokens(37)
    ran = [threading.Event() for _ in range(3)]
    hooks = [
        layer.register_forward_hook(lambda *_, event=event: event.set())
        for layer, event in zip(model.get_decoder().layers, ran, strict=True)
    ]
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt, 32)
        fam.evict(cache)
        in_time: list[bool] = []
        for entry in cache.tiers.group.entries:
            pool, mapper = entry.host_pool, entry.layer_mapper
            layers = {mapper(layer): layer for layer in range(3)}

            def load(
                *arguments: Any, inner: Any = pool.load_to_device_per_layer, layers: Any = layers, **more: Any
            ) -> Any:
                layer = layers[arguments[3]]
                if layer:
                    # The rows of a layer arrive only once the layer before it has run without them.
                    in_time.append(ran[layer - 1].wait(timeout=30))
                return inner(*arguments, **more)

            monkeypatch.setattr(pool, "load_to_device_per_layer", load)
        for event in ran:
            event.clear()
        expected = fam.forward(model, prompt[:, 32:], fam.compute_prefix(model, prompt[:, :32]).cache())
        for event in ran:
            event.clear()
        with cache.session(prompt) as past:
            assert past.hits[0].host == 32
            assert torch.equal(fam.forward(model, prompt[:, 32:], past), expected)
        assert in_time
        assert all(in_time)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("model", ["llama", "gemma3", "deepseek_v32", "falcon_h1"], indirect=True)
def test_a_session_may_go_in_and_out_of_inference_mode(model: Any) -> None:
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache:
        for cached in (0, 40):
            with torch.inference_mode(), cache.session(prompt) as past:
                assert past.cached_tokens == cached
                first = int(past.get_seq_length())
                fam.forward(model, prompt[:, first:], past)
            fam.evict(cache)
        with cache.session(prompt) as past:
            with torch.inference_mode():
                fam.forward(model, prompt[:, 40:44], past)
            fam.forward(model, prompt[:, 44:], past)
        fam.check(cache)
