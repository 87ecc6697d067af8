"""Times what a session of the transformers integration costs a model that computes next to nothing. Prints a table.

Settings are read as a session begins and before each of its forward passes, the weights looked at as it begins and
ends. Described anew are settings only after a change, such as a switch of adapters.

    python benchmarks/transformers_session.py --modules 1000 --adapted 200
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache_controller.integrations.transformers.settings import SettingsWatch

MODULES_A_LAYER = 13


class Adapted(torch.nn.Module):
    """A linear layer with the attributes of an adapter."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapter = ["a"]
        self.merged_adapters: list[str] = []
        self.scaling = {"a": 1.0, "b": 2.0}
        self.r, self.alpha, self.bias = {"a": 4, "b": 4}, {"a": 4, "b": 8}, {"a": False, "b": False}


def make_model(modules: int, adapted: int) -> Any:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_hidden_layers=max(1, (modules - adapted) // MODULES_A_LAYER),
        vocab_size=32,
    )
    model = LlamaForCausalLM(config).eval()
    linear = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    for name, each in linear[:adapted]:
        model.set_submodule(name, Adapted(each))
    return model.eval()


def milliseconds(call: Callable[[], object], rounds: int) -> str:
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        times.append((time.thread_time() - start) * 1e3)
    return f"{min(times):8.2f} {statistics.median(times):8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--adapted", type=int, default=200, help="layers that have an adapter, of the modules")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; milliseconds of processor time, shortest and median of {arguments.rounds}")
    for adapted in sorted({0, arguments.adapted}):
        model = make_model(arguments.modules, adapted)
        layers = [each for each in model.modules() if isinstance(each, Adapted)]
        watch = SettingsWatch(model)

        def session(watch: SettingsWatch = watch) -> None:
            watch.read()  # as it begins
            watch.weights_mark()
            watch.read()  # before the prompt's forward pass
            watch.weights_mark()  # as it ends

        def switch(layers: list[Adapted] = layers, watch: SettingsWatch = watch) -> None:
            for layer in layers:
                layer.active_adapter = ["b"]
            watch.read()

        print(f"{sum(1 for _ in model.modules())} modules, {adapted} of them with adapters")
        print(f"  a session of one pass       {milliseconds(session, arguments.rounds)}")
        print(f"  each further pass           {milliseconds(watch.read, arguments.rounds)}")
        if layers:
            print(f"  once after a switch         {milliseconds(switch, arguments.rounds)}")


if __name__ == "__main__":
    main()
