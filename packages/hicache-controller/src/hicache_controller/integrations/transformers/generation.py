"""Generation: what of it a session cannot serve, and a look at what ``generate`` is given while sessions are open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .errors import UnsupportedError
from .passes import Signature

if TYPE_CHECKING:
    from .cache import HiCache
    from .recorder import Recorder

ASSISTED = ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "use_mtp", "speculation_type")
"""Arguments of ``generate``, and fields of its configuration, with which it computes the tokens that others propose."""

NOT_ASSISTED = (
    "with it transformers computes the whole prompt, whatever a cache holds of it: generate without it, or without the "
    "session's cache"
)

WITHOUT_CACHE = (
    "use_cache is False, with which transformers computes all tokens again in every step, after those that the "
    "session's cache has; pass use_cache=True, or generate without the session's cache"
)


def generation_config_of(model: Any) -> Any:
    """Return the configuration that ``generate`` uses by default; None where the model does not generate."""
    return model.generation_config if model.can_generate() else None


def unsupported_generation(config: Any, given: Mapping[str, Any] | None = None) -> str | None:
    """Say what a session cannot serve of a generation configuration; None where it serves it all.

    Parameters
    ----------
    config
        The configuration; None where the model does not generate.
    given
        Arguments of ``generate``, which come before the configuration's fields.
    """
    if config is None:
        return None

    def value(name: str) -> Any:
        return given[name] if given is not None and name in given else getattr(config, name, None)

    for name in ("num_beams", "num_return_sequences"):
        if (number := value(name)) is not None and number > 1:
            return f"{name} is {number}; a session has one sequence a prompt: repeat the prompt in input_ids instead"
    for name in ASSISTED:
        if (proposer := value(name)) is not None and proposer is not False:
            shown = type(proposer).__name__ if isinstance(proposer, torch.nn.Module) else repr(proposer)
            return f"{name} is {shown}; {NOT_ASSISTED}"
    if value("token_healing"):
        return "token_healing is True, with which transformers changes the prompt: heal it before the session begins"
    if (kind := value("cache_implementation")) is not None:
        return (
            f"cache_implementation is {kind!r}; a session brings its own cache: leave it None, "
            "and pass max_cache_len to the session for a static one"
        )
    return None


class OpenSession(NamedTuple):
    """A session that was entered: its prefix cache, the cache for ``generate``, and the recorder of its passes."""

    cache: HiCache
    past: Any
    recorder: Recorder


class GenerateGuard:
    """A model's ``generate`` while sessions of the model are open: it is given what a forward pass sees only part of.

    Parameters
    ----------
    generate
        The method of the model.
    """

    def __init__(self, generate: Any) -> None:
        self._generate = generate
        self._signature = Signature(generate)
        self._sessions: list[OpenSession] = []

    @classmethod
    def add(cls, session: OpenSession) -> None:
        """Check what ``generate`` of the session's model is given with the session's cache."""
        model = session.cache.model
        if model.can_generate():
            if not isinstance(model.generate, cls):
                model.generate = cls(model.generate)
            model.generate._sessions.append(session)

    @classmethod
    def remove(cls, model: Any, past: Any) -> None:
        """Forget a session; the last one leaves the model as it was."""
        guard = getattr(model, "generate", None)
        if not isinstance(guard, cls):
            return
        guard._sessions = [each for each in guard._sessions if each.past is not past]
        if not guard._sessions:
            del model.generate
            if getattr(model, "generate", None) != guard._generate:
                model.generate = guard._generate

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Check the arguments, and generate."""
        given = self._signature.bind(arguments, options)
        for session in self._sessions:
            name = next((name for name, value in options.items() if value is session.past), None)
            if name is None:
                continue
            config = given.get("generation_config") or generation_config_of(session.cache.model)
            reason = unsupported_generation(config, given)
            if reason is None and given.get("use_cache", getattr(config, "use_cache", None)) is False:
                reason = WITHOUT_CACHE
            if reason is None:
                _check_tokens(session.recorder, given)
            else:
                session.cache.refuse(UnsupportedError(reason))
                del options[name]
        return self._generate(*arguments, **options)


def _check_tokens(recorder: Recorder, given: Mapping[str, Any]) -> None:
    tokens = given.get("inputs")
    tokens = given.get("input_ids") if tokens is None else tokens
    mask = given.get("attention_mask")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return
    # With a longer mask, what is given are the tokens after those that the cache has.
    if mask is None or mask.shape[-1] <= tokens.shape[1]:
        recorder.check_prompt(tokens)
