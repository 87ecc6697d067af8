"""What of a generation configuration a session cannot serve."""

from __future__ import annotations

from typing import Any


def generation_config_of(model: Any) -> Any:
    """Return the configuration that ``generate`` uses by default; None where the model does not generate."""
    return model.generation_config if model.can_generate() else None


def unsupported_generation(config: Any) -> str | None:
    """Say what a session cannot serve of a generation configuration; None where it serves it all."""
    if config is None:
        return None
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and value > 1:
            return f"{name} is {value}; a session has one sequence a prompt: repeat the prompt in input_ids instead"
    if config.prompt_lookup_num_tokens is not None:
        return (
            f"prompt_lookup_num_tokens is {config.prompt_lookup_num_tokens}; with it transformers computes the whole "
            "prompt, whatever a cache holds of it: leave it None"
        )
    if config.cache_implementation is not None:
        return (
            f"cache_implementation is {config.cache_implementation!r}; a session brings its own cache: leave it None, "
            "and pass max_cache_len to the session for a static one"
        )
    return None
