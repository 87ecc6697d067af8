"""Adapters as peft attaches them to a layer: the same attributes and the same ways to change them, without peft."""

from __future__ import annotations

from typing import Any

import torch


class Adapted(torch.nn.Module):
    """A linear layer and what adapters add to its output.

    Attributes
    ----------
    active_adapter, disable_adapters, scaling, merged_adapters
        As in a layer of peft: names, a switch, a factor for each name, and the names that are added to the weights.
    """

    def __init__(self, base: torch.nn.Linear, adapters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = torch.nn.ParameterDict(adapters)
        self.active_adapter = list(adapters)[:1]
        self.disable_adapters = False
        self.scaling = dict.fromkeys(adapters, 1.0)
        self.merged_adapters: list[str] = []

    def delta(self) -> torch.Tensor:
        """What the active adapters add to the weight."""
        return sum((self.scaling[name] * self.lora[name] for name in self.active_adapter), torch.zeros(()))

    def merge(self) -> None:
        """Add the active adapters to the weight, where autograd does not look."""
        self.base_layer.weight.data += self.delta().detach()
        self.merged_adapters.extend(self.active_adapter)

    def unmerge(self) -> None:
        """Take them out again."""
        self.base_layer.weight.data -= self.delta().detach()
        self.merged_adapters.clear()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        output = self.base_layer(states)
        if self.disable_adapters or self.merged_adapters:
            return output
        return output + torch.nn.functional.linear(states, self.delta())


def attach(model: Any, *, seed: int = 3) -> list[Adapted]:
    """Put the adapters "a" and "b" on the keys and values of every layer of a Llama."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Adapted] = []
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            deltas = {each: torch.randn(base.weight.shape, generator=draw) for each in ("a", "b")}
            found.append(Adapted(base, deltas))
            setattr(layer.self_attn, name, found[-1])
    model.eval()
    return found
