"""HiCache: the prefix cache of one transformers model over device, host and storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from hicache_kernels import HostLayout
from hicache_kernels.validation import finite, whole

from ...forks import refuse_in_forks
from ...hashing import Namespace
from ...storage import Fingerprint, HiCacheStorage
from ...storage.file import FileStorage
from .errors import UnsupportedError
from .generation import generation_config_of, unsupported_generation
from .identity import model_fingerprint
from .model_layout import cache_argument, decoder_of, model_layout
from .one_user import OneUser
from .past import PastCache, StaticPastCache
from .session import Session
from .settings import Settings, SettingsWatch
from .split_proof import Verdict, split_verdict
from .tiers import Tiers, build_tiers, default_page_size

logger = logging.getLogger(__name__)

StorageChoice = HiCacheStorage | str | os.PathLike[str] | Callable[[Fingerprint], HiCacheStorage]
"""A directory for a :class:`FileStorage`, a function that makes a backend for a fingerprint, or a backend."""

OnUnsupported = Literal["error", "uncached"]
"""What becomes of a request the cache cannot serve."""

_DEVICE_SHARE = 0.1
"""Part of a GPU's memory that L1 takes unless told otherwise."""


@dataclass(frozen=True)
class CacheStats:
    """What the cache holds; nothing but zeros for a model that is not supported.

    Attributes
    ----------
    page_size
        Tokens a page.
    device_tokens, host_tokens
        Tokens whose keys and values are in each tier.
    device_capacity, host_capacity
        Tokens that fit.
    storage_pages
        Pages in storage, those of other processes included; 0 without storage.
    """

    page_size: int
    device_tokens: int
    host_tokens: int
    device_capacity: int
    host_capacity: int
    storage_pages: int


class HiCache:
    """A prefix cache for ``generate`` and plain forward passes of a transformers model.

    Make one with :meth:`for_model`, use :meth:`session` for each prompt, and :meth:`close` it, or use it as a context
    manager. One thread at a time uses it: while a session is open, the thread that opened it.

    Attributes
    ----------
    model
        The model.
    fingerprint
        What the stored bytes belong to; None without storage. A backend of a kind that keeps no fingerprints, which is
        passed ready made, was not told.
    storage
        The backend, or None.
    on_unsupported
        As given to :meth:`for_model`.
    needs_positions
        Whether the model counts the positions of every pass from 0, so that sessions pass them.
    user
        The thread that uses the cache.
    """

    def __init__(
        self,
        model: Any,
        tiers: Tiers | None,
        *,
        storage: HiCacheStorage | None = None,
        owns_storage: bool = False,
        fingerprint: Fingerprint | None = None,
        on_unsupported: OnUnsupported = "error",
        unsupported: str | None = None,
        needs_positions: bool = False,
    ) -> None:
        refuse_in_forks(self)
        self.model = model
        self._tiers = tiers
        self.storage = storage
        self._owns_storage = owns_storage
        self.fingerprint = fingerprint
        self.on_unsupported = on_unsupported
        self._unsupported = unsupported
        self.needs_positions = needs_positions
        self.user = OneUser("this cache", None if tiers is None else tiers.controller.adopt_thread)
        self.decoder = decoder_of(model)
        self.cache_argument = cache_argument(self.decoder.forward)
        self._configs = (model.config, model.config.get_text_config(decoder=True))
        self._watch = SettingsWatch(model)
        self._made_with = self._watch.read()
        self._mark = self._current_mark()
        self._logged: set[str] = set()
        self._closed = False

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        model_id: str,
        revision: str | None = None,
        l1_gb: float | None = None,
        l2_gb: float = 4.0,
        storage: StorageChoice | None = None,
        page_size: int | None = None,
        layout: HostLayout | str = HostLayout.PAGE_FIRST_DIRECT,
        on_unsupported: OnUnsupported = "error",
        check_passes: bool = True,
    ) -> HiCache:
        """Look at what the model's layers keep, and allocate the tiers for it.

        Parameters
        ----------
        model
            A causal language model of transformers, with its weights, on one device.
        model_id
            Name of the model; with revision, weights, dtype and configuration part of the fingerprint under which pages
            are stored.
        revision
            Revision of the weights, if they have one. The weights are hashed as well, where there is a storage.
        l1_gb
            GB (10**9 bytes) of device memory for prefixes that need no loading; by default a tenth of the GPU's memory,
            at most ``l2_gb``; on CPU a quarter of ``l2_gb``. A prompt longer than L1 is cached in part.
        l2_gb
            GB of host memory, pinned where the model is on a GPU.
        storage
            Where pages outlive the process: a directory, a function that makes a backend for the model's
            :class:`Fingerprint`, or a backend. A backend that is passed stays the caller's; others are closed with the
            cache. One that was made for another fingerprint is refused; for one of a kind that keeps none, it is the
            caller who sees to it that no other model's pages are in it.
        page_size
            Tokens a page: prefixes are kept in whole pages. By default what makes copies fast: 16 to 256.
        layout
            Order of the bytes on the host.
        on_unsupported
            What becomes of what the cache cannot serve: ``"error"`` raises :class:`UnsupportedError`, ``"uncached"``
            logs it once and gives None for a cache, with which transformers generates as ever.
        check_passes
            Whether to compute a few random prompts in one pass and in several, once a process for each configuration,
            dtype and version of transformers, and refuse a model with which they differ by more than rounding. Some
            models continue a cache in another way than they compute a prompt, in some versions of transformers.

        Returns
        -------
        HiCache
            Ready for sessions.

        Raises
        ------
        UnsupportedError
            For a model whose layers the cache cannot restore, that computes a prompt in several passes in another way
            than in one, or that spreads over several devices.
        RuntimeError
            For a model in training mode, whose passes cannot be compared.
        ValueError
            If a tier is too small for the model, an argument is out of range, or the storage keeps the pages of another
            fingerprint than the model's.
        """
        if on_unsupported not in ("error", "uncached"):
            raise ValueError(f"on_unsupported is {on_unsupported!r}; accepted are 'error' and 'uncached'")
        for name, size in (("l1_gb", l1_gb), ("l2_gb", l2_gb)):
            if size is not None:
                finite(name, size, above=True)
        if page_size is not None:
            whole("page_size", page_size)
        verdict = Verdict()
        try:
            shape = model_layout(model)
            page_size = default_page_size(shape) if page_size is None else page_size
            # Where the decoder is given embeddings nothing is cached, see below.
            if check_passes and shape.given_tokens:
                verdict = split_verdict(model, shape, page_size)
                if verdict.reason is not None:
                    raise UnsupportedError(verdict.reason)
            l1 = _default_l1(shape.device, l2_gb) if l1_gb is None else l1_gb
            tiers = build_tiers(
                shape, page_size=page_size, l1_bytes=int(l1 * 1e9), l2_bytes=int(l2_gb * 1e9), host_layout=layout
            )
        except UnsupportedError as error:
            if on_unsupported == "error":
                raise
            return cls(model, None, on_unsupported=on_unsupported, unsupported=str(error))
        backend, fingerprint = None, None
        try:
            if storage is not None:
                fingerprint = model_fingerprint(model, model_id, revision=revision, page_size=page_size)
                backend = _open_storage(storage, fingerprint)
                _check_fingerprint(backend, fingerprint, tiers)
                tiers.controller.attach_storage_backend(backend)
            cache = cls(
                model,
                tiers,
                storage=backend,
                owns_storage=backend is not None and backend is not storage,
                fingerprint=fingerprint,
                on_unsupported=on_unsupported,
                needs_positions=verdict.needs_positions,
            )
        except BaseException:
            try:
                tiers.close()
            finally:
                if backend is not None and backend is not storage:
                    backend.close()
            raise
        if fingerprint is not None and (private := cache.read_settings().private):
            cache.log_once(
                f"what is stored will be found by this cache alone: no other process can be known to have the same "
                f"{', '.join(private[:3])}"
            )
        if not shape.given_tokens:
            cache.log_once(
                "prompts will not be cached: the model hands its decoder embeddings, which tell no tokens; make the "
                "cache for a model of text alone"
            )
        return cache

    @property
    def tiers(self) -> Tiers:
        """Pools, controller and prefix tree, for those who want to look.

        Raises
        ------
        UnsupportedError
            If the model is not supported, and ``on_unsupported`` let it pass.
        """
        if self._tiers is None:
            raise UnsupportedError(f"the model is not supported, so there are no tiers: {self._unsupported}")
        return self._tiers

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.tiers.page_size

    def session(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        checkpoints: Sequence[int] | None = None,
        namespace: Namespace | None = None,
        max_cache_len: int | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> AbstractContextManager[PastCache | StaticPastCache | None]:
        """Begin with a prompt, or a batch of prompts; ``with`` gives the cache to generate with.

        Leaving the block keeps the new complete pages, of the prompt and of what was generated, and writes them to the
        host and to storage in the background. Leaving it with an error keeps nothing.

        Parameters
        ----------
        input_ids
            int64 ``[batch, tokens]`` on any device: the whole prompts, padded on the left.
        attention_mask
            ``[batch, tokens]``, 0 for padding; needed where there is any.
        checkpoints
            For models with sliding windows or recurrent states, which can be continued only where these were saved:
            numbers of tokens of the prompt at which to save them, such as the end of a document that several
            questions follow; cut to whole pages. By default the last page boundary of the prompt, and the one where it
            leaves what the cache knows. What was generated is saved up to its last page boundary in any case. A
            recurrent model computes the prompt up to its checkpoints as the block begins.
        namespace
            Separates equal prompts, as of a tenant. Adapters and other settings of the model are separated in any case.
        max_cache_len
            Tokens of a static cache, for ``torch.compile``; for models of full attention alone. With it the pages of
            the prompt are kept, and not those of what was generated.
        generation_config
            What will be passed to ``generate``, to say in time what is not supported; by default the model's.

        Returns
        -------
        AbstractContextManager
            Its ``with`` value goes to ``generate`` as ``past_key_values``, with the whole ``input_ids``; or to a
            forward pass, with ``input_ids[:, past.get_seq_length():]``. It is None where ``on_unsupported`` is
            ``"uncached"`` and there is something the cache cannot serve.

        Raises
        ------
        RuntimeError
            If the cache is closed, the model or, on entry, a module of it is in training mode, its weights have
            changed, or another thread has a session open.
        UnsupportedError
            For beams, several return sequences, assisted decoding, prompt lookup, quantized and offloaded caches; on
            entry, for padding that is not on the left, or for any where the model takes no positions, and for a static
            cache of a model that keeps more than full attention. ``generate`` raises it too, before it computes
            anything, for what it is given itself.
        TypeError, ValueError
            For a number of tokens that is not a whole one, or negative. In the forward pass: for a mask, positions,
            arguments or settings of the model that make a restored prefix a wrong one, for ``use_cache=False``, and for
            the whole prompt given again behind the prefix; in ``generate``: for another prompt than the session's.
        """
        if self._closed:
            raise RuntimeError("the cache is closed; make a new one with HiCache.for_model")
        for number, tokens in enumerate(() if checkpoints is None else checkpoints):
            whole(f"checkpoints[{number}]", tokens, least=0)
        if max_cache_len is not None:
            whole("max_cache_len", max_cache_len)
        config = generation_config_of(self.model) if generation_config is None else generation_config
        reason = self._unsupported or unsupported_generation(config)
        if reason is not None:
            self.refuse(UnsupportedError(reason))
            return nullcontext(None)
        if self.model.training:
            raise RuntimeError("the model is in training mode, where dropout changes what is cached; call model.eval()")
        return Session(self, input_ids, attention_mask, checkpoints, namespace, max_cache_len)

    def check_weights(self) -> None:
        """Raise RuntimeError where the model is not as it was when the cache was made for it."""
        if self.model_changed():
            raise RuntimeError(
                "the model's weights were changed or moved, or another attention implementation was set, after "
                "HiCache.for_model, and what is cached belongs to what was before; close this cache and make a new one"
            )

    def model_changed(self) -> bool:
        """Whether the model's weights or attention implementation are others than when the cache was made for it."""
        return self._current_mark() != self._mark

    def _current_mark(self) -> tuple[object, ...]:
        return (self._watch.weights_mark(), *(config._attn_implementation for config in self._configs))

    def read_settings(self) -> Settings:
        """Return what decides keys and values now, apart from tokens and weights."""
        return self._watch.read()

    def namespace_with(self, settings: Settings, namespace: Namespace | None) -> Namespace | None:
        """Return the namespace of what is computed with these settings."""
        changed = self._made_with.difference(settings)
        if changed is None:
            return namespace
        if settings.autocast is None:
            self.log_once(
                f"{changed} is not what it was when the cache was made; sessions find what others with the same "
                "settings have kept"
            )
        namespace = namespace or Namespace()
        salt = namespace.salt.encode() if isinstance(namespace.salt, str) else namespace.salt
        return replace(namespace, salt=settings.digest + (b"" if salt is None else b"+" + salt))

    def refuse(self, error: UnsupportedError) -> None:
        """Raise the error, or log it once where ``on_unsupported`` is ``"uncached"``."""
        if self.on_unsupported == "error":
            raise error
        self.log_once(f"generating without the prefix cache: {error}")

    def flush(self) -> None:
        """Wait until everything kept so far is on the host and in storage."""
        if self._tiers is not None:
            with self.user:
                self._tiers.tree.drain()

    def stats(self) -> CacheStats:
        """Count what the tiers hold."""
        if self._tiers is None:
            return CacheStats(0, 0, 0, 0, 0, 0)
        held = self.tiers.tree.stats()
        size = self.page_size
        return CacheStats(
            size,
            held.device_pages * size,
            held.host_pages * size,
            self.tiers.tree.device_allocator.page_num * size,
            int(self.tiers.controller.mem_pool_host.size),
            0 if self.storage is None else self.storage.stats().pages,
        )

    def drop_device(self) -> int:
        """Empty L1, so that prefixes come from the host; returns the tokens that left. For measurements and tests."""
        if self._tiers is None:
            return 0
        with self.user:
            tree = self.tiers.tree
            tree.drain()
            for name, _ in self.tiers.windowed_pools:
                tree.evict_window_device(name, tree.window_stats(name).device_pages)
            freed = tree.evict_device(tree.stats().device_pages)
            tree.drain()
        return freed * self.page_size

    def log_once(self, message: str) -> None:
        """Log a message the first time it comes."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)

    def close(self) -> None:
        """Finish writing, stop the threads, and give the memory back; a second call does nothing.

        Every step is taken whatever the ones before it raise; the last error is raised at the end.
        """
        if self._closed:
            return
        self.user.check()
        self._closed = True
        if self._tiers is None:
            return
        with self.user, ExitStack() as steps:  # The last one first.
            if self._owns_storage and self.storage is not None:
                steps.callback(self.storage.close)
            steps.callback(self._tiers.close)
            if self._tiers.controller.has_storage:
                steps.callback(self._tiers.controller.detach_storage_backend)
            steps.callback(self._tiers.tree.drain)

    def __enter__(self) -> HiCache:
        """Return the cache."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _open_storage(storage: StorageChoice, fingerprint: Fingerprint) -> HiCacheStorage:
    if isinstance(storage, HiCacheStorage):
        return storage
    if isinstance(storage, (str, os.PathLike)):
        return FileStorage(storage, fingerprint=fingerprint)
    return storage(fingerprint)


def _check_fingerprint(backend: HiCacheStorage, fingerprint: Fingerprint, tiers: Tiers) -> None:
    """Raise ValueError where the backend takes this model's pages for those of another fingerprint."""
    for entry in tiers.group.entries:
        if entry.device_pool is None:
            continue
        digest = backend.format_digest(entry.host_pool)
        # A backend that keeps no fingerprints gives none.
        if digest and digest != fingerprint.pool_digest(entry.host_pool.geometry):
            raise ValueError(
                f"storage is a {type(backend).__name__} made for another fingerprint than this model's: pages of other "
                "weights would be taken for its own; pass a directory, or a function that takes the fingerprint and "
                "makes the backend"
            )


def _default_l1(device: torch.device, l2_gb: float) -> float:
    if device.type == "cpu":
        return l2_gb / 4
    total = torch.cuda.get_device_properties(device).total_memory
    return min(l2_gb, total * _DEVICE_SHARE / 1e9)
