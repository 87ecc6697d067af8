"""An engine of vLLM in this process, with the connector, for tests that poison its tensors and look inside."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any, NamedTuple

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from hicache_controller.integrations.vllm import HiCacheConnector, VllmSettings, kv_transfer_config

BLOCK = 32


class Answer(NamedTuple):
    """What was generated: tokens, their log-probabilities, and how many tokens of the prompt were cached."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int


class Engine:
    """One engine that loads hits of any length, unless ``settings`` say more; ``options`` go to :class:`vllm.LLM`."""

    def __init__(self, model: str, settings: VllmSettings, *, blocks: int = 96, **options: Any) -> None:
        settings = replace(settings, min_load_tokens=settings.min_load_tokens or 1)
        config = KVTransferConfig(**kv_transfer_config(settings))
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(model=model, kv_transfer_config=config, num_gpu_blocks_override=blocks, **(defaults | options))

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def worker(self) -> Any:
        connector = get_kv_transfer_group()
        assert isinstance(connector, HiCacheConnector)
        return connector.connector_worker.worker

    def generate(self, *prompts: list[int], tokens: int = 8) -> list[Answer]:
        parameters = SamplingParams(max_tokens=tokens, temperature=0, logprobs=3, detokenize=False, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = []
        for output in self.llm.generate(given, parameters, use_tqdm=False):
            (completion,) = output.outputs
            logprobs = [{token: each.logprob for token, each in step.items()} for step in completion.logprobs]
            answers.append(Answer(list(completion.token_ids), logprobs, output.num_cached_tokens))
        return answers

    def settle(self) -> None:
        """Step until nothing is in flight."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step()

    def poison(self) -> None:
        """Fill every byte of L1 with something else, and make vLLM forget what it had there."""
        self.settle()
        assert self.llm.reset_prefix_cache()
        for pool in self.worker.transfers.pools:
            for component in pool.host.device_pool.components:
                for tensor in component.tensors:
                    tensor.fill_(0x7F)

    def metrics(self) -> dict[str, float]:
        return {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompt(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 250) for _ in range(length)]


def equal(answers: list[Answer], others: list[Answer]) -> bool:
    """Whether tokens and log-probabilities are the same to the last bit."""
    return all(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(answers, others, strict=True))
