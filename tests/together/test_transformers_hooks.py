"""Hooks, replaced methods and other code that a forward pass runs through: settings of a model, as attributes are."""

from __future__ import annotations

import functools
import gc
import time
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.together import transformers_families as fam
from tests.together.transformers_served import digest, hit

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
TOKENS = 43
CACHED = 40
factor = 1.5


def double(module: Any, arguments: Any, output: Any) -> Any:
    return output * factor


def shift(module: Any, arguments: Any, options: Any) -> Any:
    return (arguments[0] + 1, *arguments[1:]), options


class Steer:
    scale = 1.0

    def __call__(self, module: Any, arguments: Any, output: Any) -> Any:
        return output * self.scale

    def hook(self, module: Any, arguments: Any, output: Any) -> Any:
        return output * self.scale


def on_forward(module: Any) -> Any:
    return module.register_forward_hook(double)


def before_forward(module: Any) -> Any:
    return module.register_forward_pre_hook(shift, with_kwargs=True)


def on_any_module(module: Any) -> Any:
    def hook(each: Any, arguments: Any, output: Any) -> Any:
        return output * 2 if each is module else None

    return torch.nn.modules.module.register_module_forward_hook(hook)


def before_any_module(module: Any) -> Any:
    def hook(each: Any, arguments: Any) -> Any:
        return (arguments[0] * 2,) if each is module else None

    return torch.nn.modules.module.register_module_forward_pre_hook(hook)


class Replaced:
    def __init__(self, module: Any) -> None:
        self.module, forward = module, module.forward
        module.forward = lambda states: forward(states) * 2

    def remove(self) -> None:
        del self.module.forward


class ReplacedInClass:
    def __init__(self, module: Any) -> None:
        self.kind, self.forward = type(module), type(module).forward
        self.kind.forward = lambda module, states: self.forward(module, states) * 2

    def remove(self) -> None:
        self.kind.forward = self.forward


CODE = [on_forward, before_forward, on_any_module, before_any_module, Replaced, ReplacedInClass]


class TestCode:
    @pytest.mark.parametrize("install", CODE, ids=lambda install: install.__name__)
    def test_hooks_and_replaced_methods_make_a_miss_until_they_are_gone(self, install: Callable[[Any], Any]) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            installed = install(model.model.layers[0].mlp)
            try:
                assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]
            finally:
                installed.remove()
            assert hit(cache, prompt) == CACHED

    @pytest.mark.parametrize("install", CODE, ids=lambda install: install.__name__)
    def test_what_is_computed_with_them_is_stored_for_one_cache_alone(
        self, install: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        prompt = fam.random_tokens(TOKENS)
        model = fam.make_model("llama", seed=1)
        with fam.open_cache(model, storage=tmp_path) as cache:
            plain = cache.fingerprint
        installed = install(model.model.layers[0].mlp)
        try:
            made = []
            for _ in range(2):
                with fam.open_cache(model, storage=tmp_path) as cache:
                    assert hit(cache, prompt) == 0
                    made.append(cache.fingerprint)
            assert len({plain, *made}) == 3
        finally:
            installed.remove()
        assert sum("stored will be found by this cache alone" in record.message for record in caplog.records) == 2
        with fam.open_cache(model, storage=tmp_path) as cache:
            assert (cache.fingerprint, hit(cache, prompt)) == (plain, 0)

    def test_what_a_hook_refers_to_is_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        steer, called, scales, inner = Steer(), Steer(), [1.0], {"scale": 1.0}

        def closure(module: Any, arguments: Any, output: Any) -> Any:
            return output * scales[0]

        def scaled(options: dict[str, float], module: Any, arguments: Any, output: Any) -> Any:
            return output * options["scale"]

        mlp = model.model.layers[0].mlp
        for hook in (steer.hook, called, closure, functools.partial(scaled, inner), double):
            mlp.register_forward_hook(hook)
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            for change in (
                lambda: setattr(steer, "scale", 2.0),
                lambda: setattr(called, "scale", 2.0),
                lambda: scales.__setitem__(0, 2.0),
                lambda: inner.update(scale=2.0),
                lambda: monkeypatch.setitem(double.__globals__, "factor", 0.5),
            ):
                change()
                assert [hit(cache, prompt) for _ in range(2)] == [0, CACHED]

    def test_a_hook_during_a_pass_alone_is_seen(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        with fam.open_cache(model) as cache:
            with cache.session(prompt) as past:
                for begin, end in ((0, 40), (40, 41), (41, 43)):
                    hook = model.model.layers[0].mlp.register_forward_hook(double) if begin == 40 else None
                    fam.forward(model, prompt[:, begin:end], past)
                    if hook is not None:
                        hook.remove()
            assert cache.stats().device_tokens == 0
            hit(cache, prompt)
            with cache.session(prompt) as past:
                model.model.layers[0].mlp.register_forward_hook(double)
                with pytest.raises(ValueError, match=r"another \S*_forward_hooks than the session"):
                    fam.forward(model, prompt[:, past.cached_tokens :], past)

    def test_hooks_that_are_dropped_with_their_table_are_gone(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        mlp = model.model.layers[0].mlp
        with fam.open_cache(model) as cache:
            hit(cache, prompt)
            mlp._forward_hooks = OrderedDict()
            assert hit(cache, prompt) == CACHED
            mlp.register_forward_hook(double)
            assert hit(cache, prompt) == 0

    def test_hooks_with_the_identity_of_one_that_is_gone_are_others(self) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(TOKENS)
        mlp = model.model.layers[0].mlp
        with fam.open_cache(model) as cache:
            for value in (2.0, 3.0, 4.0):
                hook = mlp.register_forward_hook(lambda module, arguments, output, value=value: output * value)
                assert hit(cache, prompt) == 0
                hook.remove()
                del hook
                gc.collect()

    def test_code_that_is_installed_is_known_by_its_name(self) -> None:
        model, other = (fam.make_model("llama", seed=1) for _ in range(2))
        before = digest(model)
        for each in (model, other):
            mlp = each.model.layers[0].mlp
            mlp.act = functools.partial(torch.nn.functional.gelu, approximate="tanh")
            mlp.forward = types.MethodType(type(mlp.gate_proj).forward, mlp.gate_proj)
        assert digest(model) == digest(other) != before
        other.model.layers[0].mlp.act = functools.partial(torch.nn.functional.gelu, approximate="none")
        assert digest(model) != digest(other)

    def test_what_has_no_text_is_stored_for_one_cache_alone(self) -> None:
        model = fam.make_model("llama", seed=1)
        model.model.layers[0].random = torch.Generator()
        assert digest(model) != digest(model)
        model.model.layers[0].random = time.sleep
        assert digest(model) == digest(model)
