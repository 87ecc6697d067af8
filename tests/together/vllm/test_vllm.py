"""One engine with the connector: what L1 loses comes back bit for bit, under pressure and after failures."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if "HICACHE_VLLM" not in os.environ:  # there it must not hide that vLLM cannot be imported
    pytest.importorskip("vllm", reason="vLLM is not installed; `nox -s vllm` installs it")

from tests.together.vllm.engine import BLOCK, Engine, equal, prompt
from tests.together.vllm.models import write_model

from hicache_controller.integrations.vllm import VllmSettings


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose device holds 40 blocks and whose host 60."""
    model = write_model("llama", tmp_path_factory.mktemp("llama"))
    engine = Engine(model, VllmSettings(l2_blocks=60, eviction="slru"), blocks=40)
    yield engine
    engine.close()


def test_prompts_come_back_bit_for_bit_after_l1_was_poisoned(llama: Engine) -> None:
    prompts = [prompt(400, 1), prompt(300, 2)]
    first = llama.generate(*prompts)
    llama.poison()
    again = llama.generate(*prompts)
    assert [answer.cached for answer in again] == [len(each) // BLOCK * BLOCK for each in prompts]
    assert equal(again, first)


def test_the_next_turn_of_a_chat_finds_the_answer_too(llama: Engine) -> None:
    question = prompt(200, 3)
    (answer,) = llama.generate(question, tokens=60)
    llama.poison()
    (turn,) = llama.generate(question + answer.tokens + prompt(20, 4))
    assert turn.cached == (200 + 60 - 1) // BLOCK * BLOCK


def test_a_prefix_of_another_prompt_is_found(llama: Engine) -> None:
    shared = prompt(256, 5)
    llama.generate(shared + prompt(60, 6))
    llama.poison()
    (answer,) = llama.generate(shared + prompt(60, 7))
    assert answer.cached == 256


def test_a_hit_too_short_to_pay_is_computed_and_its_blocks_can_still_be_loaded(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = prompt(200, 8)
    first = llama.generate(each)
    llama.poison()
    before = llama.metrics().get("vllm:hicache_too_short_blocks", 0)
    with monkeypatch.context() as patched:
        patched.setattr(llama.manager, "min_load_tokens", 193)
        again = llama.generate(each)
    assert again[0].cached == 0
    assert llama.metrics()["vllm:hicache_too_short_blocks"] - before == 192 // BLOCK
    llama.poison()
    monkeypatch.setattr(llama.manager, "min_load_tokens", 192)
    (loaded,) = llama.generate(each)
    assert loaded.cached == 192
    assert equal([again[0], loaded], [first[0], first[0]])


class CheckedTransfers:
    """Compares the checksum of every block with that of the page it was copied to, and of every page likewise."""

    def __init__(self, transfers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transfers = transfers
        self.expected: dict[int, list[int]] = {}
        self.checked = {True: 0, False: 0}
        self.finished = transfers.finished
        for name in ("store", "load"):
            monkeypatch.setattr(transfers, name, self.noting(name, getattr(transfers, name)))
        monkeypatch.setattr(transfers, "finished", self.compare)

    def blocks(self, numbers: torch.Tensor) -> list[int]:
        (pool,) = self.transfers.pools
        tensors = pool.host.device_pool.components[0].tensors
        return [zlib.crc32(b"".join(t[number].numpy().tobytes() for t in tensors)) for number in numbers.tolist()]

    def pages(self, numbers: torch.Tensor) -> list[int]:
        (pool,) = self.transfers.pools
        return [zlib.crc32(pool.host.read_page(number).numpy()) for number in numbers.tolist()]

    def noting(self, name: str, call: Any) -> Any:
        def noted(number: int, blocks: torch.Tensor, pages: torch.Tensor) -> None:
            self.transfers.order_after(list(self.transfers._running))  # so that what is read has come
            self.expected[number] = self.pages(pages) if name == "load" else self.blocks(blocks)
            call(number, blocks, pages)

        return noted

    def compare(self) -> list[Any]:
        finished: list[Any] = self.finished()
        for each in finished:
            found = self.blocks(each.blocks) if each.is_load else self.pages(each.pages)
            assert found == self.expected.pop(each.number)
            self.checked[each.is_load] += len(found)
        return finished


def test_every_block_is_right_with_more_requests_than_blocks_and_aborts(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = CheckedTransfers(llama.worker.transfers, monkeypatch)
    prompts = [prompt(96 * (1 + number % 3), number % 5) + prompt(40, 100 + number) for number in range(20)]
    expected = [answer for each in prompts for answer in llama.generate(each)]
    engine = llama.llm.llm_engine
    from vllm import SamplingParams

    for turn in range(2):
        for number, each in enumerate(prompts):
            name, parameters = f"{turn}-{number}", SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": each}, parameters)
            if number % 4 == 1:
                engine.step()
                engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()
    llama.settle()
    assert checked.checked[True] > 20
    assert checked.checked[False] > 40
    llama.poison()
    again = [answer for each in prompts for answer in llama.generate(each)]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]
    llama.settle()
    llama.manager.blocks.check_integrity()
    pinned = [block for block in llama.manager.blocks._blocks.values() if block.pins or not block.ready]
    assert pinned == []


@pytest.mark.parametrize("direction", ["load", "store"])
def test_blocks_whose_transfer_failed_are_computed(
    llama: Engine, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    each = prompt(300, 50 + len(direction))
    (host,) = [pool.host for pool in llama.worker.transfers.pools]
    call = {"load": "load_to_device_per_layer", "store": "backup_from_device_all_layer"}[direction]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the bus is gone")

    if direction == "load":
        first = llama.generate(each)
        llama.poison()
        with monkeypatch.context() as patched:
            patched.setattr(host, call, fail)
            again = llama.generate(each)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(host, call, fail)
            first = llama.generate(each)
            llama.settle()
        llama.poison()
        again = llama.generate(each)
        assert again[0].cached == 0
    assert equal(again, first)
    llama.poison()
    assert equal(llama.generate(each), first)
    llama.settle()
    llama.manager.blocks.check_integrity()
    assert llama.metrics()["vllm:hicache_failed_blocks"] > 0


def test_a_reset_of_the_connector_forgets_the_host(llama: Engine) -> None:
    each = prompt(200, 60)
    llama.generate(each)
    llama.settle()
    assert llama.llm.reset_prefix_cache(reset_connector=True)
    assert len(llama.manager.blocks) == 0
    assert llama.generate(each)[0].cached == 0
