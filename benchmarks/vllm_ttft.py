"""Times vLLM without a connector, with its own CPU offloading and with hicache: first tokens, passes of long prompts.

One run measures one mode in one process and adds it to the JSON; run the modes one after the other, several times, as a
machine's figures drift. Every loaded answer is compared with the first one, and its cached tokens are checked, so a
prefix that was computed anew is an error and not a time. Weights are random, of the shapes of an 8B model or of one
with multi-head latent attention.

python benchmarks/vllm_ttft.py hicache --output benchmarks/results/vllm_ttft.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "vocab_size": 32000,
                          "tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu",
                          "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500000.0}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODELS: dict[str, dict[str, Any]] = {
    "8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                   "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32,
                     "num_attention_heads": 4, "num_key_value_heads": 2},
    "mla": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "first_k_dense_replace": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}  # fmt: skip
SETTLE_STEPS = 12
"""Short requests after a long one, in whose steps stores that wait are sent and end."""


def transfer_config(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the connector's configuration."""
    if arguments.mode == "none":
        return None
    if arguments.mode == "native":
        extra = {"cpu_bytes_to_use": int(arguments.l2_gb * 1e9), "offload_prompt_only": False}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    from hicache_controller.integrations.vllm import VllmSettings, kv_transfer_config

    return kv_transfer_config(VllmSettings(l2_gb=arguments.l2_gb, min_load_tokens=arguments.min_load_tokens))


class Bench:
    """One engine, and prompts that it has not seen."""

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        config = transfer_config(arguments)
        self.arguments, self.loads, self.numbers = arguments, config is not None, random.Random(arguments.seed)
        self.llm = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, enforce_eager=not arguments.graphs,
            max_model_len=max(*arguments.lengths, arguments.pass_tokens) + 256, max_num_seqs=4,
            max_num_batched_tokens=8192, block_size=arguments.block, enable_prefix_caching=True, seed=0,
            num_gpu_blocks_override=arguments.blocks, disable_log_stats=False,
            kv_transfer_config=None if config is None else KVTransferConfig(**config),
        )  # fmt: skip

    def prompt(self, length: int) -> list[int]:
        return [self.numbers.randrange(3, 32000) for _ in range(length)]

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]], list[int]]:
        """Return seconds, the answers, and how many tokens of each prompt were cached."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(given, parameters, use_tqdm=False)
        taken = time.perf_counter() - started
        return (
            taken,
            [list(each.outputs[0].token_ids) for each in outputs],
            [each.num_cached_tokens for each in outputs],
        )

    def settle(self) -> None:
        for _ in range(SETTLE_STEPS):
            self.generate([self.prompt(8)], 2)

    def forget(self) -> None:
        self.settle()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; blocks are still in use")

    def first_token(self, length: int) -> dict[str, list[float]]:
        """Return milliseconds to the first token, computed, in L1 and loaded."""
        found: dict[str, list[float]] = {"computed": [], "l1": [], "loaded": []}
        expected = (length - 1) // self.arguments.block * self.arguments.block
        for _ in range(self.arguments.rounds):
            prompt, first = self.prompt(length), [[-1]]
            self.settle()
            for way in ("computed", "l1", "loaded") if self.loads else ("computed", "l1"):
                if way == "loaded":
                    self.forget()
                taken, answers, (cached,) = self.generate([prompt], 1)
                if way == "computed":
                    first = answers
                if way != "computed" and cached < expected:
                    raise RuntimeError(f"{way}: {cached} of {length} tokens were cached, expected {expected}")
                if answers != first:
                    raise RuntimeError(f"{way}: a prompt of {length} tokens got another first token than when computed")
                found[way].append(taken * 1e3)
        return {way: times for way, times in found.items() if times}

    def passes(self) -> dict[str, Any]:
        """Return seconds of two passes of the same prompts, and how many tokens of the second were cached."""
        prompts = [self.prompt(self.arguments.pass_tokens) for _ in range(8)]
        first, answers, _ = self.generate(prompts, 64)
        self.settle()
        second, again, cached = self.generate(prompts, 64)
        same = sum(a == b for a, b in zip(answers, again, strict=True))
        return {"first_s": first, "second_s": second, "cached": cached, "same_answers": same}


def plain_copy_ms(nbytes: int) -> float | None:
    """Return how long a copy of so many pinned bytes to the device takes at best; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times)


def token_bytes(model: dict[str, Any]) -> int:
    """Return the KV bytes of one token in bfloat16."""
    if "kv_lora_rank" in model:
        return int(model["num_hidden_layers"] * (model["kv_lora_rank"] + model["qk_rope_head_dim"]) * 2)
    return int(model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2 * 2)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode."""
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(COMMON | MODELS[arguments.model]))
        bench = Bench(arguments, directory)
        for _ in range(2):
            bench.generate([bench.prompt(arguments.lengths[0])], 4)
        lengths = {str(length): bench.first_token(length) for length in arguments.lengths}
        passes = bench.passes()
    nbytes = token_bytes(MODELS[arguments.model])
    copies = {str(length): plain_copy_ms(length * nbytes) for length in arguments.lengths}
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    return {"vllm": vllm.__version__, **settings, "ttft_ms": lengths, "plain_copy_ms": copies, "passes": passes}


def print_table(run: dict[str, Any]) -> None:
    """Print the medians of one run."""
    print(
        f"{run['mode']}, {run['model']}, graphs {run['graphs']}, own process {run['own_process']}, vLLM {run['vllm']}"
    )
    for length, ways in run["ttft_ms"].items():
        text = ", ".join(f"{way} {statistics.median(times):.1f}" for way, times in ways.items())
        copy = run["plain_copy_ms"][length]
        print(f"  {length} tokens, ms: {text}" + ("" if copy is None else f", plain copy {copy:.1f}"))
    passes = run["passes"]
    print(f"  8 prompts: first {passes['first_s']:.2f} s, second {passes['second_s']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("none", "native", "hicache"))
    parser.add_argument("--model", choices=tuple(MODELS), default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--pass-tokens", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=3200, help="blocks of the device")
    parser.add_argument("--l2-gb", type=float, default=24.0)
    parser.add_argument("--min-load-tokens", type=int, help="of hicache; by default what its figures say")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--own-process", action="store_true", help="the engine in a process of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(arguments.own_process)), "PYTHONHASHSEED": "0",
                   "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
    if not arguments.graphs:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    run = measure(arguments)
    print_table(run)
    if arguments.output is not None:
        runs = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
        arguments.output.write_text(json.dumps([*runs, run], indent=1) + "\n")


if __name__ == "__main__":
    main()
