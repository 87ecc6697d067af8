"""What a session notes of the passes it sees: nothing is kept under tokens that do not say how it was computed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from tests.together.transformers_served import compute, served
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer

from hicache_controller.integrations.transformers import HiCache, UnsupportedError
from hicache_controller.integrations.transformers.recorder import Recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
static_crops = pytest.mark.skipif(
    not hasattr(StaticLayer, "crop"), reason="this version of transformers crops no static cache"
)
either = pytest.mark.parametrize("static", [False, pytest.param(True, marks=static_crops)])


@pytest.fixture
def cache(models: dict[str, Any]) -> Iterator[HiCache]:
    with fam.open_cache(models.setdefault("llama", fam.make_model("llama", seed=1))) as cache:
        yield cache
        fam.check(cache)


def spans(prompt: int, end: int) -> Iterator[tuple[int, int]]:
    """A prompt and the steps after it."""
    yield (0, prompt)
    yield from ((step, step + 1) for step in range(prompt, end))


class TestBuffersOfTheCaller:
    def test_one_tensor_for_every_step_is_noted_with_what_it_held(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(40)
        buffer = torch.empty((1, 1), dtype=torch.int64)
        with cache.session(tokens[:, :8]) as past:
            fam.forward(cache.model, tokens[:, :8], past)
            for step in range(8, 40):
                fam.forward(cache.model, buffer.copy_(tokens[:, step : step + 1]), past)
        assert served(cache, torch.cat([tokens[:, :8], tokens[:, -1:].expand(1, 32)], 1)) <= 32
        assert served(cache, tokens) == 40

    def test_positions_are_noted_as_they_were(self, cache: HiCache) -> None:
        tokens = fam.random_tokens(24)
        positions = torch.arange(5, 29)[None]
        with cache.session(tokens) as past:
            fam.forward(cache.model, tokens, past, position_ids=positions)
            positions.sub_(5)
        assert served(cache, tokens) == 0

    @pytest.mark.parametrize("restored", [False, True])
    def test_a_prompt_that_is_overwritten_before_the_end_is_kept_as_it_was(
        self, cache: HiCache, restored: bool
    ) -> None:
        first, second = fam.random_tokens(40), fam.random_tokens(40)
        if restored:
            compute(cache, first)
        buffer = first.clone()
        with cache.session(buffer) as past:
            fam.forward(cache.model, first[:, past.cached_tokens :], past)
            buffer.copy_(second)
        assert served(cache, second) == 0
        assert served(cache, first) == 40


class TestRewinds:
    """After a crop or a reset, what was computed before it says nothing about what stands there."""

    @either
    @pytest.mark.parametrize("seen", [True, False])
    def test_what_was_cropped_and_computed_otherwise_is_not_kept(
        self, cache: HiCache, static: bool, seen: bool
    ) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(16)
        # The hooks are on one of two models with the same weights.
        model = cache.model if seen else fam.make_model("llama", seed=1)
        with cache.session(prompt, max_cache_len=64 if static else None) as past:
            fam.forward(cache.model, prompt, past)
            past.crop(-20)
            past.crop(4 - 8)
            fam.forward(model, other, past)
            past.crop(-3)
            fam.forward(model, other[:, :3], past)
        assert served(cache, prompt) == 16
        turned = torch.cat([prompt[:, :16], other[:, :13], other[:, :3]], 1)
        assert served(cache, turned) == (16 if static or not seen else 32)

    @either
    def test_a_crop_to_a_length_counts_as_that_length(self, cache: HiCache, static: bool) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(32)
        with cache.session(prompt, max_cache_len=64 if static else None) as past:
            fam.forward(cache.model, prompt, past)
            try:
                past.crop(8)
            except (RuntimeError, ValueError) as error:
                assert past.get_seq_length() == 40
                pytest.skip(f"this version of transformers takes only how much to remove: {error}")
            fam.forward(fam.make_model("llama", seed=1), other, past)
        assert served(cache, prompt) == 8

    @static_crops
    def test_a_static_cache_that_was_reset_keeps_nothing_from_before(self, cache: HiCache) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(40)
        with cache.session(prompt, max_cache_len=64) as past:
            fam.forward(cache.model, prompt, past)
            past.reset()
            fam.forward(cache.model, other, past)
            past.crop(-4)
        assert served(cache, prompt) == served(cache, other) == 0

    @static_crops
    def test_a_static_cache_keeps_nothing_after_the_prompt_where_nobody_looks(self, cache: HiCache) -> None:
        tokens, other = fam.random_tokens(56), fam.random_tokens(16)
        with cache.session(tokens[:, :40], max_cache_len=64) as past:
            fam.forward(cache.model, tokens, past)
            for layer in past.layers:
                layer.crop(-16)
            fam.forward(cache.model, other, past)
        assert served(cache, tokens) == 40

    @either
    def test_what_follows_a_restored_prefix_that_was_cropped_is_not_kept_after_it(
        self, cache: HiCache, static: bool
    ) -> None:
        prompt, other = fam.random_tokens(56), fam.random_tokens(24)
        compute(cache, prompt[:, :40])
        with cache.session(prompt, max_cache_len=64 if static else None) as past:
            assert past.cached_tokens == 40
            past.crop(-24)
            fam.forward(fam.make_model("llama", seed=1), other, past)
            fam.forward(cache.model, prompt[:, 40:], past)
        assert served(cache, prompt) == 40

    @pytest.mark.parametrize("accepted", [0, 3, 8])
    def test_candidates_are_kept_only_where_they_were_accepted(self, cache: HiCache, accepted: int) -> None:
        tokens, other = fam.random_tokens(48), fam.random_tokens(8)
        other[0, 0] = tokens[0, 40 + accepted - 8 * (accepted == 8)] % (fam.VOCABULARY - 1) + 1
        with cache.session(tokens[:, :40]) as past:
            fam.forward(cache.model, tokens, past)
            if accepted < 8:
                past.crop(accepted - 8)
            fam.forward(cache.model, other, past)
        assert served(cache, tokens) == (48 if accepted == 8 else 40)
        assert served(cache, torch.cat([tokens[:, : 40 + accepted], other], 1)) == (40 + accepted + 8) // 8 * 8

    def test_what_a_pass_that_failed_may_have_overwritten_is_not_kept(
        self, cache: HiCache, harmless_hooks: None
    ) -> None:
        prompt, other = fam.random_tokens(40), fam.random_tokens(16)

        def fail(*_: Any) -> None:
            raise OSError("injected")

        with cache.session(prompt) as past:
            fam.forward(cache.model, prompt, past)
            for layer in past.layers:
                layer.crop(-16)
            hook = cache.model.get_decoder().layers[-1].register_forward_hook(fail)
            with pytest.raises(OSError, match="injected"):
                fam.forward(cache.model, other, past)
            hook.remove()
            fam.forward(fam.make_model("llama", seed=1), other[:, :1], past)
            past.layers[2].update(*(torch.zeros(1, 2, 16, 8) for _ in range(2)))
        assert served(cache, prompt) == 24


def test_a_session_computes_nothing_of_a_prompt_with_images_by_itself() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    recurrent = fam.FAMILIES["qwen3_next"][3]
    text = fam.COMMON | {name: value for name, value in recurrent.items() if name.startswith(("head", "l"))}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    image = fam.VOCABULARY - 1
    with torch.random.fork_rng():
        config = qwen.Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=image)
        model = qwen.Qwen3_5ForConditionalGeneration(config).eval()
    words = fam.random_tokens(41).clamp(max=image - 5)
    prompt = torch.cat([words[:, :5], torch.full((1, 4), image), words[:, 5:]], 1)
    options = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (prompt == image).long(),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    expected = model.generate(prompt, **options)
    with fam.open_cache(model) as cache:
        for _ in range(2):
            with cache.session(prompt) as past:
                assert past.get_seq_length() == 0
                assert torch.equal(model.generate(prompt, past_key_values=past, **options), expected)
        assert cache.stats().device_tokens == 0
        fam.check(cache)


@pytest.mark.parametrize("model", ["falcon_h1", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("restored", [False, True])
def test_beams_that_were_not_announced_are_named_for_states_as_well(model: Any, restored: bool) -> None:
    prompt = fam.random_tokens(20)
    with fam.open_cache(model) as cache:
        if restored:
            fam.keep(cache, prompt, 16)
        refused = pytest.raises(UnsupportedError, match="num_beams is 2; a session has one sequence a prompt")
        with refused, cache.session(prompt) as past:
            model.generate(prompt, past_key_values=past, num_beams=2, max_new_tokens=3, do_sample=False)
        fam.check(cache)


def test_prompt_lookup_that_is_announced_is_refused_in_time(cache: HiCache) -> None:
    with pytest.raises(UnsupportedError, match="prompt_lookup_num_tokens is 3"):
        cache.session(fam.random_tokens(20), generation_config=GenerationConfig(prompt_lookup_num_tokens=3))


@pytest.mark.parametrize("static", [False, True])
def test_compiling_the_prompt_into_one_graph_says_what_to_do(static: bool) -> None:
    model = fam.make_model("llama", seed=1)
    prompt = fam.random_tokens(45)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    options = {"max_cache_len": 64} if static else {}
    forward = model.forward
    try:
        with fam.open_cache(model) as cache:
            model.forward = torch.compile(forward, fullgraph=True, backend="eager")
            refused = pytest.raises(RuntimeError, match="compile the steps, not the prompt")
            with refused, cache.session(prompt, **options) as past:
                model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
            torch._dynamo.reset()
            model.forward = torch.compile(forward, backend="eager")
            for cached in (0, 40):
                with cache.session(prompt, **options) as past:
                    assert past.cached_tokens == cached
                    output = model.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
                assert torch.equal(output, expected)
    finally:
        torch._dynamo.reset()


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_waits_for_nothing_on_the_device(cache: HiCache, monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    tokens = fam.random_tokens(60, batch=2)
    mask = torch.ones_like(tokens)
    mask[0, : 4 if padded else 0] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    reads, me = Reads(), threading.get_ident()

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        reads.count += threading.get_ident() == me
        return tensor.to("cpu")

    for name in ("_before", "_after"):
        inner = getattr(Recorder, name)

        @functools.wraps(inner)
        def watched(self: Recorder, *arguments: Any, inner: Any = inner) -> None:
            with reads, pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "cpu", copied)
                inner(self, *arguments)

        monkeypatch.setattr(Recorder, name, watched)
    with cache.session(tokens[:, :20], attention_mask=mask[:, :20]) as past:
        for begin, end in spans(20, 60):
            fam.forward(
                cache.model,
                tokens[:, begin:end],
                past,
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
            )
        assert reads.count == 0
    assert served(cache, tokens[1:]) == 56
    assert reads.count == 0
