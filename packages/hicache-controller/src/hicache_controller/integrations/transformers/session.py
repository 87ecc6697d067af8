"""Session: one prompt, or batch of prompts, from the prefix that is restored to the pages that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hicache_pools import PoolName

from ...hashing import Namespace
from ...tree.keys import SequenceKeys, Tokens
from ...tree.node import Pages
from ...tree.results import Match
from .checkpoints import Checkpoint, Checkpoints
from .errors import UnsupportedError
from .filling import FilledOnTouch
from .layers import FullAttention, IndexedLayer, RecurrentStates, StaticFullLayer, WindowAttention
from .matching import match_rows, release_rows
from .past import PastCache, StaticPastCache
from .recorder import Recorder
from .rows import PageRows, Row, batch_rows, copy_rows
from .tiers import Tiers

if TYPE_CHECKING:
    from .cache import HiCache


class Session:
    """A context manager whose value is the cache to generate with; see :meth:`HiCache.session`."""

    def __init__(
        self,
        cache: HiCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        checkpoints: Sequence[int] | None = None,
        namespace: Namespace | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        self._cache = cache
        self._tiers: Tiers = cache.tiers
        self._input_ids = input_ids
        self._attention_mask = attention_mask
        self._wanted = checkpoints
        self._namespace = namespace
        self._max_cache_len = max_cache_len
        self._rows: list[Row] = []
        self._past: PastCache | StaticPastCache | None = None
        self._recorder: Recorder | None = None
        self._checkpoints: Checkpoints | None = None
        self._consumers: tuple[int, ...] = ()
        self._pages: dict[str, list[PageRows]] = {}

    # Entry

    def __enter__(self) -> PastCache | StaticPastCache | None:
        """Match, start loading, and make the cache; None where it cannot be served and need not be."""
        try:
            return self._begin()
        except UnsupportedError as error:
            self._cache.refuse(error)
            return None

    def _begin(self) -> PastCache | StaticPastCache:
        if self._past is not None:
            raise RuntimeError("the session was entered before; make a new one for another prompt")
        tiers = self._tiers
        tiers.tree.poll()
        self._rows = batch_rows(self._input_ids, self._attention_mask)
        self._check_length()
        columns, hits = match_rows(tiers, self._rows, self._namespace)
        try:
            # While the first layers are on their way.
            self._cache.check_weights()
            past = self._past = self._new_past()
            past.cached_tokens, past.hits = columns, tuple(hits)
            self._checkpoints = Checkpoints(tiers, self._rows, past)
            self._begin_layers(past, columns)
            self._recorder = Recorder(
                self._cache.decoder,
                past,
                self._rows,
                self._checkpoints.after_pass if tiers.states is not None else None,
            )
            if tiers.windowed:
                self._checkpoints.want(self._wanted)
                self._compute_up_to_checkpoints(past)
        except BaseException:
            self._end(keep=False)
            raise
        return past

    def _check_length(self) -> None:
        tokens = self._input_ids.shape[1]
        if self._max_cache_len is not None and self._max_cache_len <= tokens:
            raise ValueError(
                f"max_cache_len is {self._max_cache_len}; it must be more than the prompt's {tokens} tokens"
            )

    def _new_past(self) -> PastCache | StaticPastCache:
        layout, config = self._tiers.layout, self._cache.model.config
        if self._max_cache_len is None:
            return PastCache(layout, config)
        return StaticPastCache(layout, config, self._max_cache_len)

    def _begin_layers(self, past: PastCache | StaticPastCache, columns: int) -> None:
        """Let every layer fill itself from the pages of the matches."""
        tiers, rows = self._tiers, self._rows
        prompt = rows[0].pad + rows[0].length
        for layer in past.layers:
            if isinstance(layer, FullAttention):
                layer.expected_tokens = prompt
            if isinstance(layer, WindowAttention):
                layer.retained = tiers.window_pages * tiers.page_size + 2 * tiers.page_size
        if not columns:
            return
        matches = [row.match for row in rows if row.match is not None]
        self._consumers = tuple(sorted({consumer for match in matches for consumer in match.consumers}))
        device = tiers.layout.device
        tree = tiers.tree
        self._pages[PoolName.KV] = [PageRows(tree.device_page_numbers(m), tiers.page_size, device) for m in matches]
        for name, size in tiers.windowed_pools:
            self._pages[name] = [PageRows(tree.window_page_numbers(match, name), size, device) for match in matches]
        batch = len(rows)
        for number, (layer, shape) in enumerate(zip(past.layers, tiers.layout.layers, strict=False)):
            # A function, which a deep copy of the layer shares; what is bound would bring a copy of the session.
            def fill(layer: Any, number: int = number) -> None:
                self._fill(layer, number)

            if shape.attention is not None and isinstance(layer, WindowAttention):
                held = columns if columns - rows[0].pad <= self._window_tokens(0) else self._window_tokens(0)
                layer.begin(shape.attention, batch, columns, held, device, fill)
            elif shape.attention is not None and isinstance(layer, (FullAttention, StaticFullLayer)):
                layer.begin(shape.attention, batch, columns, device, fill)
            if shape.states is not None and isinstance(layer, RecurrentStates):
                layer.begin_states(shape.states, batch, device, fill)

    def _window_tokens(self, row: int) -> int:
        return len(self._pages[PoolName.SWA][row])

    def _fill(self, layer: Any, number: int) -> None:
        """Copy a layer's rows, or those of its copy, out of the device pools, behind the load that brings them."""
        if not self._pages:
            raise RuntimeError("the session is over, and this layer was not filled while it lasted")
        counter = self._tiers.controller.layer_done_counter
        counter.set_consumer(self._consumers)
        counter.wait_until(number)
        with torch.no_grad():
            if isinstance(layer, (FullAttention, StaticFullLayer)):
                self._fill_full(layer, number)
            if isinstance(layer, WindowAttention):
                self._fill_window(layer, number)
            if isinstance(layer, RecurrentStates):
                self._fill_states(layer, number)

    def _fill_full(self, layer: FullAttention | StaticFullLayer, number: int) -> None:
        tiers = self._tiers
        if tiers.kv is None:
            raise RuntimeError("the model has a layer of full attention and no pool for it")
        local = tiers.layout.full.index(number)
        for index, (row, pages) in enumerate(zip(self._rows, self._pages[PoolName.KV], strict=True)):
            end = row.pad + row.taken
            keys, values = layer.rows(index, 0, end)
            for rows, pool in ((keys, tiers.kv.k_buffer[local]), (values, tiers.kv.v_buffer[local])):
                if row.pad:
                    # Attention hides padding, but not a NaN in it.
                    rows[:, : row.pad].zero_()
                copy_rows(rows[:, row.pad :], pages.read(pool)[: row.taken].transpose(0, 1))
            if tiers.index is not None and isinstance(layer, IndexedLayer) and layer.indexer_keys is not None:
                index_keys = layer.indexer_keys[index, :end]
                index_keys[: row.pad].zero_()
                index_keys[row.pad :].copy_(pages.read(tiers.index.kv_buffer[local])[: row.taken, 0])

    def _fill_window(self, layer: WindowAttention, number: int) -> None:
        tiers = self._tiers
        if tiers.sliding is None:
            raise RuntimeError("the model has a layer with a window and no pool for it")
        local = tiers.layout.sliding.index(number)
        held = layer.held()
        for index, pages in enumerate(self._pages[PoolName.SWA]):
            for rows, pool in zip(held, (tiers.sliding.k_buffer[local], tiers.sliding.v_buffer[local]), strict=True):
                padding = rows.shape[2] - len(pages)
                rows[index, :, :padding].zero_()
                copy_rows(rows[index, :, padding:], pages.read(pool).transpose(0, 1))

    def _fill_states(self, layer: RecurrentStates, number: int) -> None:
        tiers = self._tiers
        local = tiers.layout.recurrent.index(number)
        for index, pages in enumerate(self._pages[PoolName.MAMBA]):
            for state, pool in zip(layer.state_tensors(), tiers.state_buffers(local), strict=True):
                state[index].copy_(pages.read(pool)[0])

    def _compute_up_to_checkpoints(self, past: PastCache | StaticPastCache) -> None:
        """Run the prompt up to each checkpoint: a recurrent state can be saved only where a forward pass ends."""
        if self._checkpoints is None or self._tiers.states is None:
            return
        device = self._tiers.layout.device
        ids = self._input_ids.to(device)
        mask = None if self._attention_mask is None else self._attention_mask.to(device)
        for end in self._checkpoints.columns():
            first = int(past.get_seq_length())
            if end <= first:
                continue
            options: dict[str, Any] = {self._cache.cache_argument: past, "use_cache": True}
            if mask is not None:
                options["attention_mask"] = mask[:, :end]
                options["position_ids"] = (mask[:, :end].cumsum(-1) - 1).clamp_(min=0)[:, first:end]
            with torch.no_grad():
                self._cache.decoder(input_ids=ids[:, first:end], **options)

    # Exit

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Keep the new complete pages, unless the block was left with an error."""
        self._end(keep=kind is None)

    def _end(self, *, keep: bool) -> None:
        tree = self._tiers.tree
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.remove()
        try:
            if keep and recorder is not None and self._past is not None:
                with torch.no_grad():
                    self._keep(self._past, recorder)
        finally:
            self._pages.clear()
            if self._checkpoints is not None:
                self._checkpoints.discard()
            release_rows(tree, self._rows)
        tree.poll()

    def _keep(self, past: PastCache | StaticPastCache, recorder: Recorder) -> None:
        columns = int(past.get_seq_length())
        sequences, reason = recorder.tokens(columns)
        if reason is not None:
            self._cache.log_once(f"some tokens of a session were not cached: {reason}")
        for layer in past.layers:
            if isinstance(layer, FilledOnTouch):
                layer.fill()
        checkpoints = self._checkpoints if self._tiers.windowed else None
        if checkpoints is not None:
            checkpoints.drop_behind(recorder.rolled_back_to)
            checkpoints.save_last(columns)
        for index, (row, tokens) in enumerate(zip(self._rows, sequences, strict=True)):
            saved = [] if checkpoints is None else checkpoints.complete(index, len(tokens))
            self._keep_row(past, index, row, tokens, saved)

    def _keep_row(
        self, past: PastCache | StaticPastCache, index: int, row: Row, tokens: Tokens, checkpoints: Sequence[Checkpoint]
    ) -> None:
        tiers, tree = self._tiers, self._tiers.tree
        room = tree.device_allocator.page_num
        if tiers.windowed:
            # Pages behind the last checkpoint are no use, and a checkpoint counts at its own place alone.
            checkpoints = [each for each in checkpoints if each.tokens <= room * tiers.page_size]
            tokens = tokens[: checkpoints[-1].tokens if checkpoints else 0]
        keys = SequenceKeys(tiers.page_size, tokens, namespace=self._namespace)
        pages = min(len(keys), room)
        if not pages:
            return
        if row.match is not None:
            row.match = settled = tree.settle(row.match)
            if settled.pages * tiers.page_size < row.taken:
                self._cache.log_once("a load failed while the session used it; its tokens were not cached")
                return
        match = tree.match_prefix(keys.hashes[:pages], namespace=self._namespace)
        if match.pages < pages:
            # Also where another session is loading it.
            match = tree.load_back(match)
        count = pages - match.pages
        fresh = tree.alloc_device(count) if count > 0 else None
        if fresh is None:
            tree.release(match)
            if count > 0:
                self._cache.log_once(
                    f"the device tier had no room for {count} pages; raise l1_gb to cache longer prompts"
                )
            return
        try:
            self._copy_out(past, index, row, match.pages, fresh)
        except BaseException:
            tree.device_allocator.free_pages(fresh)
            tree.release(match)
            raise
        tree.release(self._insert(match, fresh, checkpoints))

    def _insert(self, match: Match, fresh: Pages, checkpoints: Sequence[Checkpoint]) -> Match:
        """Hand the pages over, in pieces that end where a window or a state was saved."""
        tree = self._tiers.tree
        if not self._tiers.windowed:
            return tree.insert(match, fresh).match
        at, first = 0, match.pages
        for checkpoint in checkpoints:
            end = checkpoint.tokens // self._tiers.page_size - first
            if end <= at:
                continue
            windows = checkpoint.windows(end - at)
            match = tree.insert(match, fresh[at:end], windows=windows).match
            at = end
        return match

    def _copy_out(self, past: PastCache | StaticPastCache, index: int, row: Row, first_page: int, pages: Pages) -> None:
        """Copy the rows of new pages from the layers into the device pool."""
        tiers = self._tiers
        target = PageRows(pages, tiers.page_size, tiers.layout.device)
        begin = row.pad + first_page * tiers.page_size
        end = begin + len(target)
        for local, number in enumerate(tiers.layout.full):
            layer = past.layers[number]
            if tiers.kv is None or not isinstance(layer, (FullAttention, StaticFullLayer)):
                raise RuntimeError(f"layer {number} is a {type(layer).__name__} where full attention was expected")
            keys, values = layer.rows(index, begin, end)
            target.write(tiers.kv.k_buffer[local], keys.transpose(0, 1))
            target.write(tiers.kv.v_buffer[local], values.transpose(0, 1))
            if tiers.index is not None and isinstance(layer, IndexedLayer) and layer.indexer_keys is not None:
                target.write(tiers.index.kv_buffer[local], layer.indexer_keys[index, begin:end, None])
