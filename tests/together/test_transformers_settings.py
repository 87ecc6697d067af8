"""Settings of a model: what changes what the same tokens compute is a miss, in the cache and in storage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_adapters
from tests.together import transformers_families as fam
from tests.together.transformers_served import digest, hit
from transformers import DynamicCache

from hicache_controller import Namespace

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
TOKENS = 43
CACHED = 40


def adapted() -> tuple[Any, list[transformers_adapters.Adapted]]:
    model = fam.make_model("llama", seed=1)
    return model, transformers_adapters.attach(model)


def switch(layer: transformers_adapters.Adapted, name: str) -> None:
    layer.active_adapter = [name]


def rename_active(layer: transformers_adapters.Adapted, name: str) -> None:
    layer.active_adapter[0] = name


def disable(layer: transformers_adapters.Adapted, value: bool) -> None:
    layer.disable_adapters = value


def scale(layer: transformers_adapters.Adapted, value: float) -> None:
    layer.scaling["a"] = value


class TestAdapters:
    CHANGES = [(switch, "b", "a"), (rename_active, "b", "a"), (disable, True, False), (scale, 0.5, 1.0)]

    @pytest.mark.parametrize(("change", "to", "back"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
    def test_each_state_finds_its_own_prefix_and_no_other(
        self, change: Callable[..., None], to: Any, back: Any
    ) -> None:
        model, layers = adapted()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
            for layer in layers:
                change(layer, to)
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
            for layer in layers:
                change(layer, back)
            assert hit(cache, prompt) == CACHED

    @pytest.mark.parametrize(("change", "to", "back"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
    def test_a_cache_made_in_one_state_does_not_find_what_another_stored(
        self, change: Callable[..., None], to: Any, back: Any, tmp_path: Path
    ) -> None:
        prompt, found = fam.random_tokens(TOKENS), []
        for value in (back, to, back, to):
            model, layers = adapted()
            for layer in layers:
                change(layer, value)
            with fam.open_cache(model, storage=tmp_path) as cache:
                found.append((hit(cache, prompt), cache.fingerprint))
        assert [tokens for tokens, _ in found] == [0, 0, CACHED, CACHED]
        assert found[0][1] == found[2][1] != found[1][1] == found[3][1]

    def test_merged_weights_are_others_after_they_are_unmerged_as_well(self) -> None:
        model, layers = adapted()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            assert hit(cache, prompt) == 0
            for act in (transformers_adapters.Adapted.merge, transformers_adapters.Adapted.unmerge):
                for layer in layers:
                    act(layer)
                assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]

    def test_what_is_switched_while_the_model_runs_is_not_kept(self, caplog: pytest.LogCaptureFixture) -> None:
        model, layers = adapted()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            with cache.session(prompt) as past:
                fam.forward(model, prompt[:, :30], past)
                disable(layers[2], True)
                fam.forward(model, prompt[:, 30:], past)
                disable(layers[2], False)
            assert cache.stats().device_tokens == 0
            assert (
                sum("another model.layers.1.self_attn.k_proj.disable_adapters" in r.message for r in caplog.records)
                == 1
            )
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]

    def test_a_pass_in_another_state_than_its_restored_prefix_is_an_error(self) -> None:
        model, layers = adapted()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            with cache.session(prompt) as past:
                scale(layers[0], 3.0)
                with pytest.raises(ValueError, match=r"another \S*scaling than the session"):
                    fam.forward(model, prompt[:, past.cached_tokens :], past)
            scale(layers[0], 1.0)
            assert hit(cache, prompt) == CACHED

    def test_namespaces_stay_apart_in_every_state(self) -> None:
        model, layers = adapted()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            for name in ("a", "b"):
                for layer in layers:
                    switch(layer, name)
                for namespace in (None, Namespace(salt=""), Namespace(salt=b"x"), Namespace(adapter="x")):
                    assert [hit(cache, prompt, namespace=namespace) for _ in range(2)] == [0, CACHED]

    def test_processes_with_the_same_adapters_share_a_storage(self, tmp_path: Path) -> None:
        script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.together import test_transformers_settings
test_transformers_settings.keep_in_two_states({str(tmp_path)!r})
"""
        subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
        assert keep_in_two_states(tmp_path) == [CACHED] * 4


def keep_in_two_states(storage: Path | str) -> list[int]:
    """Keep a prompt with two scales of an adapter, for two models; returns what came from storage each time."""
    found: list[int] = []
    prompt = torch.arange(1, TOKENS + 1)[None]
    for family in ("llama", "gemma3"):
        model = fam.make_model(family, seed=1)
        layers = transformers_adapters.attach(model)
        with fam.open_cache(model, storage=storage) as cache:
            for value in (1.0, 2.0):
                for layer in layers:
                    scale(layer, value)
                with cache.session(prompt, checkpoints=[CACHED]) as past:
                    found.append(past.hits[0].storage)
                    for begin, end in fam.spans(past.cached_tokens, CACHED, TOKENS):
                        fam.forward(model, prompt[:, begin:end], past)
    return found


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def nested(attention: Any) -> None:
    attention.extra[0]["deep"][1]["scale"] = 2.0


def in_place(attention: Any) -> None:
    attention.plain.mul_(2)


def outside(attention: Any) -> None:
    attention.modules_in_a_list[0].eps = 0.5


def outside_weight(attention: Any) -> None:
    with torch.no_grad():
        attention.modules_in_a_list[0].weight[1] += 1


def element(attention: Any) -> None:
    attention.array[1] = 7


def slot(attention: Any) -> None:
    attention.slotted.value = 2


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    def change(attention: Any) -> None:
        setattr(attention, name, value)

    change.__name__ = name
    return change


def moved(attention: Any) -> None:
    attention.second.append(attention.first.pop())


def removed(attention: Any) -> None:
    del attention.tag


ATTRIBUTES = [
    attribute("scaling", 0.1),
    attribute("tag", "eager"),
    attribute("added", None),
    attribute("plain", torch.ones(3)),
    attribute("flag", 1),
    *(nested, in_place, element, slot, moved, removed, outside, outside_weight),
]


def with_attributes() -> Any:
    model = fam.make_model("llama", seed=1)
    attention = model.model.layers[1].self_attn
    attention.extra = ({"deep": [1, {"scale": 1.0}]}, frozenset("xy"))
    attention.plain, attention.array, attention.slotted = torch.arange(3.0), np.arange(3), Slotted(1)
    attention.modules_in_a_list = [torch.nn.LayerNorm(3), torch.nn.LayerNorm(3)]
    attention.tag, attention.flag, attention.first, attention.second = "sdpa", True, [1], [2, 3]
    return model


class TestAttributes:
    @pytest.mark.parametrize("change", ATTRIBUTES, ids=lambda change: change.__name__)
    def test_any_that_changes_makes_a_miss_and_another_fingerprint(self, change: Callable[[Any], None]) -> None:
        model = with_attributes()
        prompt = fam.random_tokens(TOKENS)
        before = digest(model)
        assert digest(with_attributes()) == before
        with fam.open_cache(model) as cache:
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
            change(model.model.layers[1].self_attn)
            assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
        assert digest(model) != before

    def test_rope_parameters_are_part_of_it(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        before = digest(model)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            model.model.rotary_emb.attention_scaling *= 1.25
            assert hit(cache, prompt) == 0
            with torch.no_grad():
                model.model.rotary_emb.inv_freq.mul_(1.25)
            with pytest.raises(RuntimeError, match="weights were changed"), cache.session(prompt):
                pass
        assert digest(model) != before

    def test_equal_values_in_other_objects_are_no_change(self) -> None:
        model = with_attributes()
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            attention = model.model.layers[1].self_attn
            attention.scaling = float(str(attention.scaling))
            attention.extra = ({"deep": [1, {"scale": float("1")}]}, frozenset("yx"))
            attention.plain, attention.array, attention.slotted = torch.arange(3.0), np.arange(3), Slotted(1)
            attention.modules_in_a_list = [torch.nn.LayerNorm(3), torch.nn.LayerNorm(3)]
            assert hit(cache, prompt) == CACHED

    def test_what_generates_and_what_is_shown_is_no_change(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        before = digest(model)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            model.generation_config.temperature = 0.5
            fam.make_model("llama", seed=2).set_attn_implementation("eager")
            model.name_or_path = model.config._name_or_path = "elsewhere"
            fam.forward(model, prompt, DynamicCache(config=model.config), output_hidden_states=True)
            with cache.session(fam.random_tokens(20)):
                assert hit(cache, prompt) == CACHED
        assert digest(model) == before

    def test_an_attribute_of_a_class_is_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        before = digest(model)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            monkeypatch.setattr(type(model.model.layers[0].mlp), "factor", 2.0, raising=False)
            assert hit(cache, prompt) == 0
        assert digest(model) != before

    def test_a_module_in_training_mode_is_named(self) -> None:
        model = fam.make_model("llama", seed=1)
        with fam.open_cache(model) as cache:
            model.model.layers[2].mlp.train()
            with pytest.raises(RuntimeError, match=r"^model\.layers\.2\.mlp is in training mode"):
                cache.session(fam.random_tokens(20)).__enter__()
            fam.check(cache)

    def test_the_precision_of_matrix_products_is_part_of_it(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        precision = torch.get_float32_matmul_precision()
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            try:
                torch.set_float32_matmul_precision("medium")
                assert hit(cache, prompt) == 0
            finally:
                torch.set_float32_matmul_precision(precision)
            assert hit(cache, prompt) == CACHED

    def test_a_model_that_writes_what_it_reads_keeps_nothing_and_says_which(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        mlp = model.model.layers[0].mlp
        mlp.calls = 0

        def count(module: Any, *_: Any) -> None:
            module.calls += 1

        mlp.register_forward_hook(count)
        with fam.open_cache(model) as cache:
            for _ in range(2):
                with cache.session(prompt) as past:
                    assert past.cached_tokens == 0
                    for begin, end in fam.spans(0, 20, TOKENS):
                        fam.forward(model, prompt[:, begin:end], past)
            assert cache.stats().device_tokens == 0
        assert sum("another model.layers.0.mlp.calls" in record.message for record in caplog.records) == 1
