"""How sessions of transformers end: during another session's load, after errors, and with what must not be kept."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from tests.together import transformers_families as fam
from transformers import StaticCache

from hicache_controller.integrations.transformers import HiCache
from hicache_controller.integrations.transformers import session as session_module
from hicache_controller.integrations.transformers.checkpoints import Checkpoints
from hicache_controller.integrations.transformers.layers import RecurrentStates

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]
LOADS = ("load_to_device_per_layer", "load_to_device_all_layer")


def check_nothing_lost(cache: HiCache) -> None:
    """Check integrity, and that every device page is either free or the tree's, and none is pinned."""
    tree = cache.tiers.tree
    tree.drain()
    fam.check(cache)
    free, total = tree.device_allocator.available_pages, tree.device_allocator.page_num
    assert free + tree.stats().device_pages == total
    cache.drop_device()
    assert tree.stats().device_pages == 0
    for name, size in cache.tiers.windowed_pools:
        entry = cache.tiers.group.get_entry(name)
        assert tree.window_stats(name).device_pages == 0
        everything = entry.device_alloc_fn(entry.device_pool.size)
        assert everything is not None, (name, size)
        entry.device_free_fn(everything)


def check_served(cache: HiCache, tokens: torch.Tensor, cached: int | None = None) -> None:
    """Check that a prompt is continued as if it were computed anew, from so many tokens; keeps nothing."""
    with contextlib.suppress(fam.LeftError), cache.session(tokens, checkpoints=()) as past:
        if cached is not None:
            assert past.cached_tokens == cached
        logits = fam.forward(cache.model, tokens[:, past.get_seq_length() :], past)
        fresh = fam.forward(cache.model, tokens, fam.DynamicCache(config=cache.model.config))
        torch.testing.assert_close(logits, fresh[:, -logits.shape[1] :])
        raise fam.LeftError


def replace_loads(cache: HiCache, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    """Have ``load(inner)`` stand for the loads of all host pools."""
    for entry in cache.tiers.group.entries:
        for name in LOADS:
            if hasattr(entry.host_pool, name):
                monkeypatch.setattr(entry.host_pool, name, load(getattr(entry.host_pool, name)))


class OtherLoads:
    """A session that was begun, and another one with the same beginning whose load waits for ``gate``."""

    def __init__(self, cache: HiCache, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.cache = cache
        self.gate = threading.Event()
        self.shared = fam.random_tokens(8 * fam.PAGE + 3)
        self.prompt = torch.cat([self.shared[:, : 6 * fam.PAGE], fam.random_tokens(3)], 1)

        def late(inner: Any) -> Any:
            def load(*arguments: Any, **options: Any) -> Any:
                assert self.gate.wait(30)
                if fails:
                    raise OSError("injected")
                return inner(*arguments, **options)

            return load

        self.loads = late
        self.monkeypatch = monkeypatch

    def run(self, session: contextlib.ExitStack) -> None:
        """Leave the session while the other one's load is under way, and let that one end."""
        cache, tree = self.cache, self.cache.tiers.tree
        past = session.enter_context(cache.session(self.prompt, checkpoints=[3 * fam.PAGE, 6 * fam.PAGE]))
        fam.forward(cache.model, self.prompt[:, past.get_seq_length() :], past)
        fam.keep(cache, self.shared, 8 * fam.PAGE)
        cache.drop_device()  # its memory stays as it is: the session has saved windows and states there
        with self.monkeypatch.context() as patch:
            replace_loads(cache, patch, self.loads)
            other = cache.session(self.shared, checkpoints=())
            other.__enter__()
            assert tree._transfers.loads
            poll = tree._transfers.poll

            def open_and_poll(*arguments: Any, **options: Any) -> Any:
                # The thread that waits for a load opens the gate, and no other does.
                if options.get("wait") or any(arguments):
                    self.gate.set()
                return poll(*arguments, **options)

            patch.setattr(tree._transfers, "poll", open_and_poll)
            try:
                session.close()
            finally:
                self.gate.set()
                other.__exit__(fam.LeftError, fam.LeftError(), None)
                tree.drain()


@pytest.mark.parametrize("model", fam.WINDOWED, indirect=True)
def test_a_session_ends_while_another_one_loads_its_pages(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fam.open_cache(model) as cache:
        other = OtherLoads(cache, monkeypatch)
        other.run(contextlib.ExitStack())
        longer = torch.cat([other.prompt[:, : 6 * fam.PAGE], fam.random_tokens(9)], 1)
        check_served(cache, longer, 6 * fam.PAGE)
        check_nothing_lost(cache)


@pytest.mark.parametrize("model", ["gemma3", "mistral", "qwen3_next"], indirect=True)
def test_a_session_stops_where_the_load_of_pages_that_are_its_own_as_well_fails(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fam.open_cache(model) as cache:
        other = OtherLoads(cache, monkeypatch, fails=True)
        other.run(contextlib.ExitStack())
        for tokens in (other.prompt, other.shared):
            check_served(cache, tokens)
        check_nothing_lost(cache)


@pytest.mark.parametrize("step", ["the first piece", "the second piece", "settle"])
@pytest.mark.parametrize("model", ["gemma3", "falcon_h1"], indirect=True)
def test_an_error_while_pages_are_handed_over_loses_none(
    model: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache:
        tree = cache.tiers.tree
        insert, settle = tree.insert, tree.settle
        inserted: list[int] = []

        def fail_or_insert(match: Any, pages: Any, **options: Any) -> Any:
            if step == ("the second piece" if inserted else "the first piece"):
                raise ValueError("injected")
            inserted.append(len(pages))
            return insert(match, pages, **options)

        def fail_or_settle(match: Any) -> Any:
            if step == "settle" and inserted:
                raise ValueError("injected")
            return settle(match)

        with monkeypatch.context() as patch:
            patch.setattr(tree, "insert", fail_or_insert)
            patch.setattr(tree, "settle", fail_or_settle)
            with pytest.raises(ValueError, match="injected"), cache.session(prompt, checkpoints=[16, 32]) as past:
                fam.forward(model, prompt[:, past.get_seq_length() :], past)
        assert sum(inserted) == (0 if step == "the first piece" else 2)
        check_served(cache, prompt, 8 * sum(inserted))
        check_nothing_lost(cache)


def test_pages_of_an_insert_that_was_interrupted_are_not_given_to_a_second_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fam.make_model("llama", seed=1)
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache:
        tree = cache.tiers.tree
        free, insert = tree.device_allocator.available_pages, tree.insert

        def interrupted(*arguments: Any, **options: Any) -> Any:
            insert(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(tree, "insert", interrupted)
            with pytest.raises(KeyboardInterrupt), cache.session(prompt) as past:
                fam.forward(model, prompt, past)
        tree.drain()
        assert tree.device_allocator.available_pages + tree.stats().device_pages == free
        check_served(cache, prompt, 40)
        fam.check(cache)


def test_an_error_before_pages_are_handed_over_leaves_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fam.make_model("llama", seed=1)
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache:
        fam.keep(cache, prompt[:, :21], 16)

        def fail(*_: Any) -> None:
            raise OSError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(cache.tiers.tree, "alloc_device", fail)
            with pytest.raises(OSError, match="injected"), cache.session(prompt) as past:
                fam.forward(model, prompt[:, past.get_seq_length() :], past)
        check_nothing_lost(cache)


class TestALoadThatFailsAtOnce:
    """A load that has failed, and was polled, before the session looks at its pages."""

    def enter(self, cache: HiCache, monkeypatch: pytest.MonkeyPatch, prompt: torch.Tensor, mask: Any = None) -> Any:
        def failing(_: Any) -> Any:
            def load(*arguments: Any, **options: Any) -> Any:
                raise OSError("injected")

            return load

        match_rows = session_module.match_rows

        def match_and_poll(*arguments: Any, **options: Any) -> Any:
            found = match_rows(*arguments, **options)
            tree = cache.tiers.tree
            while tree._transfers.loads:
                tree.poll(wait=True)
            return found

        with monkeypatch.context() as patch:
            replace_loads(cache, patch, failing)
            patch.setattr(session_module, "match_rows", match_and_poll)
            session = cache.session(prompt, attention_mask=mask, checkpoints=())
            return session, session.__enter__()

    @pytest.mark.parametrize("model", ["llama", *fam.WINDOWED], indirect=True)
    def test_the_session_computes_what_it_was_to_bring(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        prompt = fam.random_tokens(45)
        with fam.open_cache(model) as cache:
            fam.keep(cache, prompt[:, :40], 40)
            fam.evict(cache)
            fam.keep(cache, prompt[:, :21], 16)
            fam.evict(cache)
            session, past = self.enter(cache, monkeypatch, prompt)
            assert past.cached_tokens == past.hits[0].tokens == 0
            assert past.hits[0].host == 40
            logits = fam.forward(model, prompt[:, past.get_seq_length() :], past)
            fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
            torch.testing.assert_close(logits[:, -1], fresh[:, -1])
            session.__exit__(None, None, None)
            assert sum("a load failed as a session began" in record.message for record in caplog.records) == 1
            check_served(cache, prompt)
            check_nothing_lost(cache)

    @pytest.mark.parametrize("model", ["llama", "mistral", "falcon_h1"], indirect=True)
    def test_what_was_on_the_device_already_is_used(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt = fam.random_tokens(45)
        with fam.open_cache(model) as cache:
            fam.keep(cache, prompt[:, :17], 16)
            fam.keep(cache, prompt[:, :41], 40)
            fam.evict(cache)
            check_served(cache, prompt[:, :17], 16)  # loads the first two pages
            session, past = self.enter(cache, monkeypatch, prompt)
            assert past.cached_tokens == past.hits[0].tokens == 16
            logits = fam.forward(model, prompt[:, 16:], past)
            fresh = fam.forward(model, prompt, fam.DynamicCache(config=model.config))
            torch.testing.assert_close(logits[:, -1], fresh[:, -1])
            session.__exit__(None, None, None)
            check_nothing_lost(cache)

    @pytest.mark.parametrize("on_device", [0, 16])
    @pytest.mark.parametrize("model", ["llama", "mistral"], indirect=True)
    def test_a_batch_uses_what_every_sequence_has(
        self, model: Any, on_device: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = fam.random_tokens(45, batch=2)
        with fam.open_cache(model) as cache:
            for prompt in prompts.split(1):
                fam.keep(cache, prompt[:, :17], 16)
                fam.keep(cache, prompt[:, :41], 40)
            fam.evict(cache)
            # The first sequence is on the device, of the second only the beginning.
            check_served(cache, prompts[:1, :41], 40)
            if on_device:
                check_served(cache, prompts[1:, :17], 16)
            session, past = self.enter(cache, monkeypatch, prompts)
            # The window of the first one is that of its end, so it cannot be continued at the second one's.
            usable = 0 if model.config.model_type == "mistral" else on_device
            assert past.cached_tokens == usable
            assert [hit.tokens for hit in past.hits] == [usable, usable]
            logits = fam.forward(model, prompts[:, usable:], past)
            fresh = fam.forward(model, prompts, fam.DynamicCache(config=model.config))
            torch.testing.assert_close(logits[:, -1], fresh[:, -1])
            session.__exit__(None, None, None)
            check_nothing_lost(cache)


def take_every_other_page(cache: HiCache) -> None:
    """Leave no two free pages of the device next to each other."""
    allocator = cache.tiers.tree.device_allocator
    taken = [allocator.alloc(fam.PAGE) for _ in range(allocator.page_num)]
    for page in taken[::2]:
        allocator.free(page)


class TestAutocast:
    @pytest.mark.parametrize("pages", ["next to each other", "apart"])
    @pytest.mark.parametrize("model", ["llama", "mistral", "gemma3", "falcon_h1", "deepseek_v32"], indirect=True)
    def test_nothing_that_was_computed_under_it_is_kept(
        self, model: Any, pages: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        prompt = fam.random_tokens(43)
        with fam.open_cache(model) as cache:
            if pages == "apart":
                take_every_other_page(cache)
            with torch.autocast("cpu", torch.bfloat16), cache.session(prompt, checkpoints=[16, 32]) as past:
                fam.forward(model, prompt[:, past.get_seq_length() :], past)
            assert cache.stats().device_tokens == cache.stats().host_tokens == 0
            assert sum("torch.autocast" in record.message for record in caplog.records) == 1
            assert not model.get_decoder()._forward_pre_hooks

    @pytest.mark.parametrize("cut", [10, 26])
    @pytest.mark.parametrize("model", ["llama", "mistral", "gemma3"], indirect=True)
    def test_nothing_of_a_session_that_was_partly_under_it_is_kept(self, model: Any, cut: int) -> None:
        # What the pass under it computes is rounded, and lies in rows of the model's type.
        prompt = fam.random_tokens(43)
        with fam.open_cache(model) as cache:
            with cache.session(prompt, checkpoints=[8, 32]) as past:
                fam.forward(model, prompt[:, :cut], past)
                with torch.autocast("cpu", torch.bfloat16):
                    fam.forward(model, prompt[:, cut:], past)
            assert cache.stats().device_tokens == 0

    @pytest.mark.parametrize("model", ["llama", "mistral"], indirect=True)
    def test_what_was_computed_without_it_is_not_restored_under_it(self, model: Any) -> None:
        prompt = fam.random_tokens(63)
        with fam.open_cache(model) as cache:
            fam.keep(cache, prompt[:, :25], 24)
            with torch.autocast("cpu", torch.bfloat16), cache.session(prompt) as past:
                assert past.cached_tokens == 0
                fam.forward(model, prompt, past)
            with cache.session(prompt) as past:
                assert past.cached_tokens == 24
                with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"another torch\.autocast"):
                    fam.forward(model, prompt[:, 24:], past)
            assert cache.stats().device_tokens == 24

    def test_a_static_cache_of_it_is_not_kept(self, caplog: pytest.LogCaptureFixture) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(43)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                fam.forward(model, prompt, StaticCache(model.config, max_cache_len=64))
        except RuntimeError as error:
            pytest.skip(f"static caches of transformers {transformers.__version__} take no autocast: {error}")
        with fam.open_cache(model) as cache:
            with torch.autocast("cpu", torch.bfloat16), cache.session(prompt, max_cache_len=64) as past:
                fam.forward(model, prompt, past)
            assert cache.stats().device_tokens == 0
        assert sum("torch.autocast" in record.message for record in caplog.records) == 1

    @pytest.mark.parametrize("model", ["gemma3", "falcon_h1"], indirect=True)
    def test_a_checkpoint_is_not_taken_in_another_type(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        saved: list[int] = []
        complete = Checkpoints.complete

        def count(self: Checkpoints, *arguments: Any) -> Any:
            found = complete(self, *arguments)
            saved.append(len(found))
            return found

        monkeypatch.setattr(Checkpoints, "complete", count)
        monkeypatch.setattr(session_module.Session, "_worth_nothing", lambda *_: None)
        monkeypatch.setattr(session_module.Session, "_copy_out", lambda *_: pytest.fail("rows were copied"))
        prompt = fam.random_tokens(43)
        with (
            fam.open_cache(model) as cache,
            torch.autocast("cpu", torch.bfloat16),
            cache.session(prompt, checkpoints=[16, 32]) as past,
        ):
            fam.forward(model, prompt[:, past.get_seq_length() :], past)
            kept = [layer for layer in past.layers if isinstance(layer, RecurrentStates)]
            if kept and all(state.dtype == torch.float32 for layer in kept for state in layer.state_tensors()):
                pytest.skip(f"states keep their type under autocast in transformers {transformers.__version__}")
        assert saved == [0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "falcon_h1", "bamba", "deepseek_v32"])
def test_types_of_half_precision_models_are_those_of_their_pools(family: str) -> None:
    model = fam.make_model(family, seed=1, dtype=torch.bfloat16)
    prompt = fam.random_tokens(45)
    with fam.open_cache(model) as cache:
        for cached in (0, 40):
            with cache.session(prompt) as past:
                assert past.cached_tokens == cached
                fam.forward(model, prompt[:, int(past.get_seq_length()) : 42], past)
                for token in range(42, 45):
                    fam.forward(model, prompt[:, token : token + 1], past)


class TestAModelThatChangesInTheBlock:
    @pytest.mark.parametrize("when", ["before the pass", "after it"])
    @pytest.mark.parametrize("change", ["weights", "attention"])
    def test_nothing_of_the_session_is_kept(
        self, change: str, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = fam.make_model("llama", seed=1)
        prompt = fam.random_tokens(43)

        def alter() -> None:
            if change == "attention":
                model.set_attn_implementation("eager")
            else:
                with torch.no_grad():
                    model.model.layers[0].self_attn.k_proj.weight.add_(0.5)

        with fam.open_cache(model, storage=tmp_path) as cache:
            with cache.session(prompt) as past:
                if when == "before the pass":
                    alter()
                fam.forward(model, prompt, past)
                if when == "after it":
                    alter()
            assert cache.stats().device_tokens == 0
        assert sum("were changed in it" in record.message for record in caplog.records) == 1
        with fam.open_cache(fam.make_model("llama", seed=1), storage=tmp_path) as cache:
            check_served(cache, prompt, 0)


def test_another_attention_implementation_than_the_one_the_cache_was_made_for_is_refused(tmp_path: Path) -> None:
    model = fam.make_model("llama", seed=1)
    prompt = fam.random_tokens(43)
    with fam.open_cache(model, storage=tmp_path) as cache:
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="attention implementation"), cache.session(prompt):
            pass
        model.set_attn_implementation("sdpa")
        with cache.session(prompt) as past:
            fam.forward(model, prompt, past)
        check_served(cache, prompt, 40)
