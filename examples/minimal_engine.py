"""A small but complete inference engine, and where each hicache call belongs in it.

A paged KV pool, continuous batching, a scheduler with waiting, running and retracted requests, and two tiers of cache
below the pool (L1): host memory (L2) and files (L3). Run it: it serves many-turn chats three times, without cache, with
it, and in a new engine that finds the files of the one before, and checks that all three give the same tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tiny_model import DEVICE, DTYPE, HEAD_DIM, KV_HEADS, LAYERS, MAX_TOKENS, VOCABULARY, Model
from torch.nn.functional import scaled_dot_product_attention

from hicache_controller import Ack, Fingerprint, HiCacheController, StorageSettings, UnifiedRadixCache
from hicache_controller.policies import PrefetchPolicy
from hicache_controller.storage.file import FileStorage
from hicache_controller.tree import Match, Pages, Prefetching, SequenceKeys
from hicache_pools import ExtentAllocator, HostPoolGroup, MHATokenToKVPool, MHATokenToKVPoolHost, PoolEntry, PoolName

PAGE_SIZE, DEVICE_PAGES, HOST_PAGES, MAX_RUNNING, NEW_TOKENS = 16, 104, 128, 6, 40


@dataclass(eq=False)
class Request:
    """A request: its tokens, and where their keys and values lie."""

    id: int
    tokens: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose keys and values are in the pool
    match: Match = field(init=False)  # while it runs: its prefix in the tree, pinned
    pages: Pages = field(init=False)  # while it runs: its own device pages, after the prefix
    prefetching: Prefetching | None = None  # while it waits: what storage may still add to its prefix
    loads: tuple[int, ...] = ()  # while it runs: the loads that fill its prefix, for the layers to wait for
    found: tuple[int, int] = (0, 0)  # pages the tree had on the device, and there or on the host


class Controller(HiCacheController):
    """Notes when the acks of writes come, to show it. No engine needs this: the tree reads the acks in ``poll``.

    A write has two. ``device_released``: its rows on the device have been read; after it the tree gives their pages
    out again. ``host_ready``: its bytes have arrived; only then are they loaded, or stored.
    """

    def __init__(self, group: HostPoolGroup) -> None:
        # A request waits for its pages rather than compute what storage has.
        super().__init__(group, storage=StorageSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE))
        self.writes: list[tuple[float, Ack]] = []
        self.seen: dict[str, list[float]] = {"device_released": [], "host_ready": []}

    def start_writing(self) -> Ack | None:
        """Start the queued writes and keep their ack."""
        ack = super().start_writing()
        if ack is not None:
            self.writes.append((time.perf_counter(), ack))
        return ack

    def watch(self) -> None:
        """Note which acks have come; asking costs nothing, ``synchronize`` would wait."""
        for name, seconds in self.seen.items():
            for begin, ack in self.writes[len(seconds) :]:
                if not getattr(ack, name).query():
                    break
                seconds.append(time.perf_counter() - begin)


class Engine:
    """Scheduler, paged pool and cache; ``storage`` is the directory of L3, None for an engine without any cache."""

    def __init__(self, model: Model, storage: Path | None) -> None:
        self.model, self.reuse = model, storage is not None
        self.waiting, self.retracted = deque[Request](), deque[Request]()
        self.running: list[Request] = []
        self.counts = dict.fromkeys(("prompts", "L1", "L2", "L3", "computed", "retracted requests"), 0)
        # The engine's own buffers: hicache describes them where they are and allocates no device memory for them.
        shape = (DEVICE_PAGES * PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.k, self.v = ([torch.zeros(shape, dtype=DTYPE, device=DEVICE) for _ in range(LAYERS)] for _ in range(2))
        device_pool = MHATokenToKVPool.from_buffers(k=self.k, v=self.v, page_size=PAGE_SIZE)
        # Pools (and the kernels below them): host memory of the same geometry, and the transfers between the two.
        self.host_pool = MHATokenToKVPoolHost(device_pool, 0, 0, PAGE_SIZE, pages=HOST_PAGES)
        # One allocator has the device pages: for loads through the entry, for the engine through the tree.
        allocator = ExtentAllocator(DEVICE_PAGES, PAGE_SIZE)
        entry = PoolEntry(PoolName.KV, self.host_pool, device_pool, lambda layer: layer, True)
        entry.device_alloc_fn, entry.device_free_fn = allocator.alloc, allocator.free
        # Controller: orders transfers against compute. Tree: knows what is cached where.
        self.controller = Controller(HostPoolGroup([entry]))
        self.storage: FileStorage | None = None
        if storage is not None:
            # The fingerprint says whose bytes these are; those of other weights or another format are never found.
            self.storage = FileStorage(storage, fingerprint=Fingerprint("minimal-engine", revision="seed 0"))
            self.controller.attach_storage_backend(self.storage)
        self.cache = UnifiedRadixCache(self.controller, allocator, page_size=PAGE_SIZE, write_policy="write_through")

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if len(request.tokens) + NEW_TOKENS > min(MAX_TOKENS, DEVICE_PAGES * PAGE_SIZE):
            raise ValueError(f"request {request.id} has {len(request.tokens)} tokens; it would outgrow model or pool")
        self.waiting.append(request)
        self.counts["prompts"] += len(request.tokens)

    def step(self) -> list[Request]:
        """Run the model once for everything that is ready; returns the requests that are finished."""
        self.cache.poll()  # handles finished transfers, without waiting for any
        self.controller.watch()
        self.restore()
        for request in list(self.running):
            while request in self.running and not self.grow(request):
                self.retract(self.running[-1])
        if not self.retracted:  # retracted requests come back before new ones start
            self.admit()
        if not self.running:  # what waiting requests have pinned may be what is in the way
            for request in self.waiting:
                if request.prefetching is not None:
                    self.cache.release(self.cache.finish_prefetch(request.prefetching))
                    request.prefetching = None
        if self.running:
            self.compute()
        finished = [request for request in self.running if len(request.output) == NEW_TOKENS]
        for request in finished:
            self.finish(request)
        return finished

    def admit(self) -> None:
        """Start waiting requests: match, fetch from storage, load back, and take pages for what is left to compute."""
        while self.waiting and len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            if request.prefetching is None:
                # The longest cached prefix, pinned: its pages stay until it is released. The last token
                # is never part of it, as without computing one there is nothing to sample from.
                match = self.cache.match_prefix(self.keys(request.tokens[:-1]))
                request.found = match.device_pages, match.pages
                request.prefetching = self.cache.start_prefetch(match)
            if self.running and not self.cache.prefetch_ready(request.prefetching):
                return  # storage still reads; meanwhile the others continue
            match = self.cache.finish_prefetch(request.prefetching)
            request.prefetching, fetched = None, match.pages
            # From the host to the device, without waiting: attention waits for each layer when it gets there.
            match = self.cache.load_back(match, wait=False)
            request.loads = match.consumers  # before any call that may poll: a load that failed is in no match after it
            new = -(-len(request.tokens) // PAGE_SIZE) - match.pages
            pages = self.cache.alloc_device(new)  # evicts what is not pinned
            if pages is None:
                self.cache.release(match)
                return
            request.match, request.pages, request.computed = match, pages, match.pages * PAGE_SIZE
            by_tier = np.diff(np.minimum((0, *request.found, fetched), match.pages))  # a load may bring less than found
            for tier, count in zip(("L1", "L2", "L3"), by_tier, strict=True):
                self.counts[tier] += int(count) * PAGE_SIZE
            self.running.append(self.waiting.popleft())

    def grow(self, request: Request) -> bool:
        """Give a request the page that its next token needs; False where the pool is full of running requests."""
        missing = -(-len(request.tokens) // PAGE_SIZE) - request.match.pages - len(request.pages)
        pages = self.cache.alloc_device(missing)
        if pages is not None:
            request.pages = np.concatenate((request.pages, pages))
        return pages is not None

    def retract(self, request: Request) -> None:
        """Take a request off the device: to the host with all it has, or where that has no room, back to the queue."""
        self.running.remove(request)
        worked = request.computed > request.match.pages * PAGE_SIZE
        if worked and self.cache.retraction_backup(str(request.id), request.match, request.pages):
            self.counts["retracted requests"] += 1
            self.retracted.append(request)
        else:  # what of it was published is found again when its turn comes
            self.controller.evict_device(slots_of(request.pages))
            self.cache.release(request.match)
            self.waiting.appendleft(request)

    def restore(self) -> None:
        """Bring retracted requests back, half-filled last page and all, as far as there is room."""
        while self.retracted and (restored := self.cache.retraction_restore(str(self.retracted[0].id))):
            request = self.retracted.popleft()
            request.match, request.pages, request.loads = restored.match, restored.pages, restored.match.consumers
            self.running.append(request)

    def compute(self) -> None:
        """Run the model on all tokens that are not in the pool yet: whole prompts together with single tokens."""
        sampled = self.forward(self.running)
        for request, token in zip(self.running, sampled, strict=True):
            self.counts["computed"] += len(request.tokens) - request.computed
            request.computed = len(request.tokens)
            # Publish the whole pages of the prompt. Write-through: the write to the host starts here, after the work
            # on the current stream. Where another request was first, the tree's pages replace ours.
            count = len(request.match.rest())
            if count:
                request.match = self.cache.insert(self.cache.settle(request.match), request.pages, count).match
                request.pages = request.pages[count:]
            request.tokens.append(token)
            request.output.append(token)

    def forward(self, batch: list[Request]) -> list[int]:
        """Compute the new tokens of each request, and sample its next one."""
        counts = [len(request.tokens) - request.computed for request in batch]
        tables = [self.slots(request) for request in batch]  # rows of the pool, one for each token of a request
        new_rows = torch.cat([table[-count:] for table, count in zip(tables, counts, strict=True)])
        positions = [torch.arange(len(table), device=DEVICE)[-n:] for table, n in zip(tables, counts, strict=True)]
        tokens = [token for request, n in zip(batch, counts, strict=True) for token in request.tokens[-n:]]
        self.controller.layer_done_counter.set_consumer([load for each in batch for load in each.loads])

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # On a GPU the stream waits, not this thread, and later layers are copied while this one computes.
            # Raises if a load failed; a server would settle the matches then, and give shorter ones another pass.
            self.controller.layer_done_counter.wait_until(layer)
            self.k[layer][new_rows], self.v[layer][new_rows] = k, v
            attended = []
            for query, at, table in zip(torch.split(q, counts), positions, tables, strict=True):
                mask = at[:, None] >= torch.arange(len(table), device=DEVICE)
                q_, k_, v_ = (each.transpose(0, 1) for each in (query, self.k[layer][table], self.v[layer][table]))
                attended.append(scaled_dot_product_attention(q_, k_, v_, mask, enable_gqa=True).transpose(0, 1))
            return torch.cat(attended)

        hidden = self.model(torch.tensor(tokens, device=DEVICE), torch.cat(positions), attention)
        last = hidden[torch.tensor(counts, device=DEVICE).cumsum(0) - 1]
        return list(map(int, (last @ self.model.head).argmax(-1).tolist()))

    def finish(self, request: Request) -> None:
        """Publish the output too, as the next turn begins with it, and give the rest back."""
        self.running.remove(request)
        keys = self.keys(request.tokens[: request.computed])
        # This match is longer than our own where another request has published the same output meanwhile.
        whole = self.cache.load_back(self.cache.match_prefix(keys))
        theirs, ours = whole.pages - request.match.pages, len(keys) - request.match.pages
        self.cache.release(self.cache.insert(whole, request.pages[theirs:ours]).match)
        self.controller.evict_device(slots_of(np.concatenate((request.pages[:theirs], request.pages[ours:]))))
        self.cache.release(request.match)

    def keys(self, tokens: list[int]) -> SequenceKeys:
        """Page keys of a sequence; none without cache, so that nothing matches and nothing is published."""
        return SequenceKeys(PAGE_SIZE, np.array(tokens if self.reuse else [], np.int64))

    def slots(self, request: Request) -> torch.Tensor:
        """Rows of the pool that hold a request's tokens, int64 ``[len(tokens)]``."""
        pages = np.concatenate((self.cache.device_page_numbers(request.match), request.pages))
        return slots_of(pages)[: len(request.tokens)].to(DEVICE)

    def close(self) -> None:
        """Let the last writes reach host and storage, then end everything in order."""
        self.cache.drain()
        self.controller.shutdown()
        if self.storage is not None:
            self.storage.close()
        self.host_pool.destroy()


def slots_of(pages: Pages) -> torch.Tensor:
    """Slots of whole pages, in order."""
    return torch.from_numpy(np.add.outer(pages * PAGE_SIZE, np.arange(PAGE_SIZE)).reshape(-1))


def serve_chats(engine: Engine, chats: int = 8, turns: int = 3) -> tuple[list[list[int]], float]:
    """Serve chats that share two system prompts, turn by turn; returns all tokens of each, and the seconds it took."""
    random, begin = np.random.default_rng(0), time.perf_counter()
    systems = random.integers(VOCABULARY, size=(2, 320)).tolist()
    questions = random.integers(VOCABULARY, size=(chats, turns, 60)).tolist()
    said: list[list[int]] = [systems[number % 2] for number in range(chats)]
    for number in range(chats):
        engine.submit(Request(number, said[number] + questions[number].pop()))
    while engine.waiting or engine.running or engine.retracted:
        for request in engine.step():
            said[request.id] = request.tokens
            if questions[request.id]:
                engine.submit(Request(request.id, request.tokens + questions[request.id].pop()))
    return said, time.perf_counter() - begin


def main() -> None:
    """Serve the same chats three times and compare."""
    torch.set_num_threads(1)  # at this size, more threads only get in each other's way
    model, answers, figures = Model(), [], []
    with tempfile.TemporaryDirectory(prefix="hicache-engine-") as directory:
        for storage in (None, Path(directory), Path(directory)):
            engine = Engine(model, storage)
            said, seconds = serve_chats(engine)
            engine.close()
            answers.append(said)
            acks = {f"{ack}, ms": round(1e3 * float(np.mean(t or 0)), 1) for ack, t in engine.controller.seen.items()}
            figures.append(engine.counts | acks | {"seconds": round(seconds, 1)})
    table = Table(f"tokens, on {DEVICE.type}", "no cache", "hicache", "restarted")
    for name in figures[0]:
        table.add_row(name, *(str(column[name]) for column in figures))
    Console().print(table)
    if any(said != answers[0] for said in answers) or not all(figures[2][tier] for tier in ("L1", "L2", "L3")):
        raise SystemExit("the three engines gave different tokens, or a tier was of no use")
    Console().print("The three engines gave the same tokens.")


if __name__ == "__main__":
    main()
