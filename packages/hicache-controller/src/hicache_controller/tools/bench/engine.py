"""Time to the first token of a long prompt: computed anew, and continued from each tier of the cache."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch

from hicache_pools import HostMemoryBudget

from ...storage import Fingerprint
from ...storage.file import FileStorage
from ..dtypes import ELEMENT_BYTES
from .models import random_model
from .options import EngineOptions

_SLOW_SECONDS = 2.0
_ROOM = 1.1  # of the tiers, over the bytes of the longest prompt
_MIN_BYTES = 64 << 20


class BenchError(RuntimeError):
    """A measurement that would be wrong; the message says why."""


class _KeepNothingError(Exception):
    """Leaves a session without publishing, so that every repetition finds the same."""


@dataclass(frozen=True)
class PromptTimes:
    """Medians for one prompt length, in seconds; None where something was not measured.

    Attributes
    ----------
    prompt, computed
        Tokens of the prompt, and those of them after the prefix.
    prefill
        Time to first token without any cache.
    l1, l2, l3
        The same with the prefix in the device cache, on the host alone, in files alone (which the system keeps in
        memory, as they were written just before).
    offloaded
        The same from transformers' own offloaded cache, which keeps the keys and values of one sequence on the host.
    load_bytes, load_seconds, load_path
        Bytes that one load moves from the host to the device, its mean time on the device's clock, and its path.
    fetch_seconds
        Mean time that the pages of one prompt take from files to the host.
    copy
        A plain copy of as many bytes from one block of pinned memory (CPU: of plain memory).
    """

    prompt: int
    computed: int
    prefill: float
    l1: float
    l2: float | None = None
    l3: float | None = None
    offloaded: float | None = None
    load_bytes: int = 0
    load_seconds: float | None = None
    load_path: str = ""
    fetch_seconds: float | None = None
    copy: float | None = None

    @property
    def l2_over_bound(self) -> float | None:
        """Time from L2, over the larger of the plain copy and what is left to compute: 1 is a perfect overlap."""
        return None if self.l2 is None or self.copy is None else self.l2 / max(self.copy, self.l1)

    @property
    def prefill_over_l2(self) -> float | None:
        """How many times faster L2 is than computing the prompt anew."""
        return None if self.l2 is None else self.prefill / self.l2

    @property
    def l3_over_l2(self) -> float | None:
        """How many times longer files take than the host."""
        return None if self.l2 is None or self.l3 is None else self.l3 / self.l2


@dataclass
class _Loads:
    """Bytes by path, and seconds, of loads; and seconds of fetching from storage."""

    bytes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    fetching: float = 0.0

    @property
    def total(self) -> int:
        return self.bytes.total()

    def __add__(self, other: _Loads) -> _Loads:
        return _Loads(self.bytes + other.bytes, self.seconds + other.seconds, self.fetching + other.fetching)

    def __sub__(self, before: _Loads) -> _Loads:
        return _Loads(self.bytes - before.bytes, self.seconds - before.seconds, self.fetching - before.fetching)

    def mean(self, runs: int) -> _Loads:
        """Return what one of so many moved."""
        sizes = Counter({path: size // runs for path, size in self.bytes.items()})
        return _Loads(sizes, self.seconds / runs, self.fetching / runs)


class EngineBench:
    """A model, its cache and its prompts; a context manager.

    Parameters
    ----------
    options
        What to measure.

    Raises
    ------
    ModuleNotFoundError
        Where transformers is missing.
    ValueError
        If a prompt is too short for its tail and a page.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self._exit = contextlib.ExitStack()
        try:
            self._build()
        except BaseException:
            self._exit.close()
            raise

    def _build(self) -> None:
        options = self.options
        room = max(_ROOM * max(options.prompts) * options.token_bytes, _MIN_BYTES)
        on_device = room + options.shape.parameters * ELEMENT_BYTES[options.dtype]
        HostMemoryBudget().check(int(room + (on_device if self.device.type == "cpu" else 0)))
        self.model = random_model(
            options.shape, positions=max(options.prompts), dtype=vars(torch)[options.dtype], device=self.device
        )
        from ...integrations.transformers import HiCache
        from ...integrations.transformers.model_layout import cache_argument

        directory = options.storage
        if directory is None:
            directory = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="hicache-bench-")))
        self.storage: FileStorage | None = None

        def open_storage(fingerprint: Fingerprint) -> FileStorage:
            self.storage = FileStorage(directory, fingerprint=fingerprint, threads=options.storage_threads)
            return self.storage

        self.cache: Any = self._exit.enter_context(
            HiCache.for_model(
                self.model,
                model_id="hicache-bench",
                l1_gb=room / 1e9,
                l2_gb=room / 1e9,
                storage=open_storage if "l3" in options.tiers else None,
                page_size=options.page_size,
            )
        )
        self._cache_argument = cache_argument(self.model.forward)
        shortest, least = min(options.prompts), self.cache.page_size + options.tail
        if shortest < least:
            raise ValueError(f"prompts has one of {shortest} tokens; a page and a tail need {least}")

    def __enter__(self) -> EngineBench:
        """Return the bench."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cache and remove what was stored."""
        with self._exit:
            if self.storage is not None:
                self.storage.clear()

    def run(self, progress: Callable[[str], None] = lambda _: None) -> list[PromptTimes]:
        """Measure every prompt length.

        Parameters
        ----------
        progress
            Called with what is measured next.

        Raises
        ------
        BenchError
            If a prefix did not come from the tier that is measured, or the tiers gave different logits.
        """
        with torch.no_grad():
            return [self._measure(length, progress) for length in self.options.prompts]

    def _measure(self, length: int, progress: Callable[[str], None]) -> PromptTimes:
        options, size = self.options, self.cache.page_size
        prefix = (length - options.tail) // size * size
        generator = torch.Generator().manual_seed(length)
        prompt = torch.randint(options.shape.vocabulary, (1, length), generator=generator).to(self.device)

        progress(f"{length} tokens: computed anew")
        prefill, _ = self._repeat(lambda: self._prefill(prompt))
        self._drop(host=True)
        with self.cache.session(prompt[:, :prefix]) as past:
            self._forward(prompt[:, :prefix], past)
        self.cache.flush()

        progress(f"{length} tokens: from each tier")
        times, logits, moved = self._from_tiers(prompt, prefix)
        for tier, found in logits.items():
            if not torch.equal(found, logits["l1"]):
                raise BenchError(f"the logits from {tier} differ from those of the prefix in L1, for {length} tokens")
        progress(f"{length} tokens: the rest")
        load = moved.get("l2", _Loads())
        copy = self._plain_copy(load.total) if load.total else None
        offloaded = self._offloaded(prompt, prefix) if self.device.type == "cuda" else None
        return PromptTimes(
            prompt=length,
            computed=length - prefix,
            prefill=prefill,
            l1=times["l1"],
            l2=times.get("l2"),
            l3=times.get("l3"),
            offloaded=offloaded,
            load_bytes=load.total,
            load_seconds=load.seconds or None,
            load_path="+".join(sorted(load.bytes)),
            fetch_seconds=moved["l3"].fetching if "l3" in moved else None,
            copy=copy,
        )

    # One measurement

    def _from_tiers(
        self, prompt: torch.Tensor, prefix: int
    ) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, _Loads]]:
        """Median time, logits and mean loads by tier; the tiers in turns, as a CPU has faster and slower moments."""
        tiers = ("l1", *(tier for tier in self.options.tiers if tier != "l1"))
        samples: dict[str, list[float]] = {tier: [] for tier in tiers}
        moved = {tier: _Loads() for tier in tiers}
        logits: dict[str, torch.Tensor] = {}
        for _ in range(self.options.repeats + 1):
            for tier in tiers:
                if samples[tier] and samples[tier][-1] > _SLOW_SECONDS:
                    continue
                self._leave_in(tier)
                before = self._loaded()
                seconds, logits[tier] = self._continue(prompt, tier, prefix)
                self.cache.flush()
                moved[tier] += self._loaded() - before
                samples[tier].append(seconds)
        times = {tier: median(each[1:] or each) for tier, each in samples.items()}
        return times, logits, {tier: moved[tier].mean(len(each)) for tier, each in samples.items()}

    def _repeat(
        self, call: Callable[[], tuple[float, torch.Tensor]], before: Callable[[], object] = lambda: None
    ) -> tuple[float, torch.Tensor]:
        """Median of some calls after one to warm up, and the logits of the last; slow ones are measured once."""
        before()
        seconds, logits = call()
        if seconds > _SLOW_SECONDS:
            return seconds, logits
        samples = []
        for _ in range(self.options.repeats):
            before()
            seconds, logits = call()
            samples.append(seconds)
        return median(samples), logits

    @contextlib.contextmanager
    def _clock(self) -> Iterator[list[float]]:
        """Measure a block that ends with a token on the CPU."""
        self._synchronize()
        seconds: list[float] = []
        begin = time.perf_counter()
        yield seconds
        seconds.append(time.perf_counter() - begin)

    def _forward(self, tokens: torch.Tensor, past: Any) -> torch.Tensor:
        """Logits after the last of some tokens."""
        options = {self._cache_argument: past}
        output = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **options)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _prefill(self, prompt: torch.Tensor) -> tuple[float, torch.Tensor]:
        from transformers import DynamicCache

        with self._clock() as seconds:
            past: Any = DynamicCache(config=self.model.config)
            for chunk in torch.split(prompt, self.options.chunk or prompt.shape[1], dim=1):
                logits = self._forward(chunk, past)
            logits.argmax().item()
        return seconds[0], logits

    def _continue(self, prompt: torch.Tensor, tier: str, prefix: int) -> tuple[float, torch.Tensor]:
        """Begin a session, compute what is left, and keep nothing."""
        with contextlib.suppress(_KeepNothingError), contextlib.ExitStack() as stack:
            with self._clock() as seconds:
                past = stack.enter_context(self.cache.session(prompt))
                logits = self._forward(prompt[:, past.get_seq_length() :], past)
                logits.argmax().item()
            hit = past.hits[0]
            if {"l1": hit.device, "l2": hit.host, "l3": hit.storage}[tier] != prefix or hit.tokens != prefix:
                raise BenchError(f"a prefix of {prefix} tokens was to come from {tier}; the session found {hit}")
            raise _KeepNothingError
        return seconds[0], logits

    def _leave_in(self, tier: str) -> None:
        """Wait until nothing moves, and take the prefix out of the tiers above."""
        self.cache.flush()
        if tier != "l1":
            self._drop(host=tier == "l3")

    def _drop(self, *, host: bool) -> None:
        self.cache.drop_device()
        tree = self.cache.tiers.tree
        if host:
            tree.evict_host(tree.stats().host_pages)

    # What it is compared with

    def _offloaded(self, prompt: torch.Tensor, prefix: int) -> float:
        """Continue from transformers' own offloaded cache, put back to the prefix before each repetition."""
        from transformers import DynamicCache

        past: Any = DynamicCache(config=self.model.config, offloading=True)
        for chunk in torch.split(prompt[:, :prefix], self.options.chunk or prefix, dim=1):
            self._forward(chunk, past)
        self._synchronize()
        for layer in past.layers:
            layer.offload()
        self._synchronize()
        kept = [(layer.keys, layer.values) for layer in past.layers]

        def put_back() -> None:
            for layer, (keys, values) in zip(past.layers, kept, strict=True):
                layer.keys, layer.values = keys, values

        def proceed() -> tuple[float, torch.Tensor]:
            with self._clock() as seconds:
                # A cache that was just filled has its first layer on the device already; here its load starts now.
                past.prefetch(0, past.only_non_sliding)
                logits = self._forward(prompt[:, prefix:], past)
                logits.argmax().item()
            return seconds[0], logits

        return self._repeat(proceed, before=put_back)[0]

    def _plain_copy(self, size: int) -> float:
        pinned = self.device.type != "cpu"
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        samples = []
        for _ in range(self.options.repeats + 1):
            self._synchronize()
            begin = time.perf_counter()
            target.copy_(host, non_blocking=True)
            self._synchronize()
            samples.append(time.perf_counter() - begin)
        return median(samples[1:])

    def _loaded(self) -> _Loads:
        """Return what was loaded so far."""
        loads, metrics = _Loads(), self.cache.tiers.controller.metrics.snapshot()
        for labels, size in metrics.counters.get("transfer_bytes", {}).items():
            if ("direction", "load") in labels:
                loads.bytes[dict(labels)["path"]] += int(size)
        for labels, times in metrics.histograms.get("transfer_seconds", {}).items():
            if ("direction", "load") in labels:
                loads.seconds += times.sum
        for labels, times in metrics.histograms.get("storage_seconds", {}).items():
            if ("operation", "prefetch") in labels:
                loads.fetching += times.sum
        return loads

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
