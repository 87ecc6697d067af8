"""``hicache vllm-config``: the checked configuration of the vLLM connector as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hicache_kernels.command_line import CommandError

from ..integrations.vllm.settings import EVICTIONS, VllmSettings, kv_transfer_config


def vllm_config(
    l2_gb: Annotated[float, typer.Option(help="Host memory of the engine, all of its workers together, in GB.")],
    storage: Annotated[
        str | None, typer.Option(help="file:///directory, mooncake://host:port, or the name of a storage backend.")
    ] = None,
    storage_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the storage backend, such as capacity_bytes=1000000000000.")
    ] = None,
    storage_wait_seconds: Annotated[float, typer.Option(help="How long a request waits for storage.")] = 5.0,
    eviction: Annotated[str, typer.Option(help=f"What leaves the host first: {', '.join(EVICTIONS)}.")] = "lru",
    revision: Annotated[
        str | None, typer.Option(help="Revision of the weights, where vLLM is not given one; storage needs it.")
    ] = None,
    offload_prompt_only: Annotated[bool, typer.Option(help="Keep blocks of prompts alone, not of answers.")] = False,
    min_load_tokens: Annotated[
        int | None, typer.Option(help="Tokens a hit must at least have to be loaded; otherwise from the model's speed.")
    ] = None,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(help="How fast the engine computes a prompt; says which hits are too short to load.")
    ] = VllmSettings.prefill_tokens_per_second,
) -> None:
    """Print the JSON for vllm serve --kv-transfer-config."""
    try:
        settings = VllmSettings(
            l2_gb=l2_gb,
            eviction=eviction,
            storage=storage,
            storage_options=dict(map(_pair, storage_option or ())),
            storage_wait_seconds=storage_wait_seconds,
            revision=revision,
            offload_prompt_only=offload_prompt_only,
            min_load_tokens=min_load_tokens,
            prefill_tokens_per_second=prefill_tokens_per_second,
        )
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    typer.echo(json.dumps(kv_transfer_config(settings)))


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise CommandError(f"--storage-option is {text!r}; accepted is NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
