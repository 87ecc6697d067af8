"""Session: one prompt, or batch of prompts, from the prefix that is restored to the pages that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hicache_pools import PoolName

from ...hashing import Namespace
from ...tree import Match, Pages, SequenceKeys
from .checkpoints import Checkpoint, Checkpoints
from .errors import UnsupportedError
from .filling import FilledOnTouch
from .generation import GenerateGuard, OpenSession
from .layers import FullAttention, IndexedLayer, RecurrentStates, StaticFullLayer, WindowAttention
from .matching import match_rows, release_rows
from .model_layout import takes_positions
from .past import PastCache, StaticPastCache
from .precision import other_type
from .recorder import Recorder
from .rows import PageRows, Row, Tokens, batch_rows, copy_rows
from .settings import Settings
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
        self._settings: Settings | None = None
        self._checkpoints: Checkpoints | None = None
        self._consumers: tuple[int, ...] = ()
        self._pages: dict[str, list[PageRows]] = {}

    # Entry

    def __enter__(self) -> PastCache | StaticPastCache | None:
        """Match, start loading, and make the cache; None where it cannot be served and need not be."""
        self._cache.user.enter()
        try:
            return self._begin()
        except UnsupportedError as error:
            try:
                self._cache.refuse(error)
            except UnsupportedError:
                self._cache.user.leave()
                raise
            return None
        except BaseException:
            self._cache.user.leave()
            raise

    def _begin(self) -> PastCache | StaticPastCache:
        if self._past is not None:
            raise RuntimeError("the session was entered before; make a new one for another prompt")
        tiers = self._tiers
        tiers.tree.poll()
        self._rows = batch_rows(self._input_ids, self._attention_mask)
        self._check_length()
        settings = self._settings = self._cache.read_settings()
        if settings.training is not None:
            raise RuntimeError(
                f"{settings.training} is in training mode, where dropout changes what is cached; call model.eval()"
            )
        self._namespace = self._cache.namespace_with(settings, self._namespace)
        if any(row.pad for row in self._rows) and not takes_positions(self._cache.decoder.forward):
            raise UnsupportedError(
                f"the batch is padded, and {type(self._cache.model).__name__} takes no position_ids, so that what it "
                "computes may depend on the padding; pass prompts one by one, or several of one length"
            )
        columns, hits = match_rows(tiers, self._rows, self._namespace)
        try:
            if columns != (columns := self._take_pages(columns)):
                hits = [replace(hit, tokens=row.taken) for hit, row in zip(hits, self._rows, strict=True)]
            # While the first layers are being loaded.
            self._cache.check_weights()
            past = self._past = self._new_past()
            past.cached_tokens, past.hits = columns, tuple(hits)
            self._checkpoints = Checkpoints(tiers, self._rows, past)
            self._begin_layers(past, columns)
            self._recorder = Recorder(
                self._cache.decoder,
                past,
                self._rows,
                self._changed_setting,
                self._checkpoints.after_pass if tiers.states is not None else None,
                needs_positions=self._cache.needs_positions,
            )
            if tiers.windowed:
                self._checkpoints.want(self._wanted)
                self._compute_up_to_checkpoints(past)
                self._recorder.begin_after_prefix()
            GenerateGuard.add(OpenSession(self._cache, past, self._recorder))
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

    def _take_pages(self, columns: int) -> int:
        """Note the pages that are to be read; returns the columns in them, fewer where a load has failed already."""
        if not columns:
            return 0
        try:
            self._note_pages()
        except ValueError:
            self._cache.log_once("a load failed as a session began; what it was to bring is computed anew")
            columns = self._settle_rows()
            if columns:
                self._note_pages()
        return columns

    def _note_pages(self) -> None:
        tiers, tree = self._tiers, self._tiers.tree
        device = tiers.layout.device
        matches = [row.match for row in self._rows if row.match is not None]
        self._consumers = tuple(sorted({consumer for match in matches for consumer in match.consumers}))
        self._pages[PoolName.KV] = [PageRows(tree.device_page_numbers(m), tiers.page_size, device) for m in matches]
        for name, size in tiers.windowed_pools:
            self._pages[name] = [PageRows(tree.window_page_numbers(match, name), size, device) for match in matches]

    def _settle_rows(self) -> int:
        """Wait for all loads and take what they brought; returns the columns that this is for every sequence."""
        tiers, rows = self._tiers, self._rows
        for row in rows:
            if row.match is not None:
                row.match = tiers.tree.settle(row.match)
        pages = [0 if row.match is None else row.match.pages for row in rows]
        columns = min(row.pad + count * tiers.page_size for row, count in zip(rows, pages, strict=True))
        if tiers.windowed and len(set(pages)) > 1:
            columns = 0  # a window or a state is there at the end of each match alone
        for row in rows:
            row.taken = max(0, columns - row.pad)
        return columns if any(row.taken for row in rows) else 0

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
        batch, device = len(rows), tiers.layout.device
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
        """Copy a layer's rows, or those of its copy, out of the device pools, after the load that fills them."""
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
        if not self._tiers.layout.given_tokens:
            return  # Some of the tokens represent an image, which the session does not have.
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
        self._cache.user.check()
        try:
            self._end(keep=kind is None)
        finally:
            self._cache.user.leave()

    def _end(self, *, keep: bool) -> None:
        tree = self._tiers.tree
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.remove()
        GenerateGuard.remove(self._cache.model, self._past)
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
        if (why := self._worth_nothing(past)) is not None:
            self._cache.log_once(f"nothing of a session was cached: {why}")
            return
        checkpoints = self._checkpoints if self._tiers.windowed else None
        if checkpoints is not None:
            checkpoints.drop_behind(recorder.rolled_back_to)
            checkpoints.save_last(columns)
        for index, (row, tokens) in enumerate(zip(self._rows, sequences, strict=True)):
            saved = [] if checkpoints is None else checkpoints.complete(index, len(tokens))
            self._keep_row(past, index, row, tokens, saved)

    def _changed_setting(self) -> str | None:
        """Name a setting of the model that is not what it was as the session began."""
        return None if self._settings is None else self._settings.difference(self._cache.read_settings())

    def _worth_nothing(self, past: PastCache | StaticPastCache) -> str | None:
        """Why nothing that was computed belongs to the model as the cache knows it; None if it does."""
        if self._cache.model_changed():
            return "the model's weights or attention implementation were changed in it"
        if self._settings is not None and self._settings.autocast is not None:
            return "it ran under torch.autocast, which computes in other types than the model's"
        return other_type(self._tiers, past)

    def _keep_row(
        self, past: PastCache | StaticPastCache, index: int, row: Row, tokens: Tokens, checkpoints: Sequence[Checkpoint]
    ) -> None:
        tiers, tree = self._tiers, self._tiers.tree
        room = tree.device_allocator.page_num
        if tiers.windowed:
            # Pages after the last checkpoint cannot be used, and a checkpoint counts only at its own position.
            checkpoints = [each for each in checkpoints if each.tokens <= room * tiers.page_size]
            tokens = tokens[: checkpoints[-1].tokens if checkpoints else 0]
        keys = SequenceKeys(tiers.page_size, tokens, namespace=self._namespace)
        pages = min(len(keys), room)
        if not pages:
            return
        if row.match is not None:
            row.match = settled = tree.settle(row.match)
            if settled.pages * tiers.page_size < row.taken:
                self._log_failed_load()
                return
        match = tree.match_prefix(keys.hashes[:pages], namespace=self._namespace)
        try:
            if match.pages < pages:
                # Also where another session is loading it.
                match = tree.load_back(match, wait=False)
                match = tree.settle(match)
            count = pages - match.pages
            fresh = tree.alloc_device(count) if count > 0 else None
        except BaseException:
            tree.release(match)
            raise
        if fresh is not None:
            self._insert_pages(past, index, row, match, fresh, checkpoints)
            return
        tree.release(match)
        if count > 0:
            self._cache.log_once(f"the device tier had no room for {count} pages; raise l1_gb to cache longer prompts")

    def _insert_pages(
        self,
        past: PastCache | StaticPastCache,
        index: int,
        row: Row,
        match: Match,
        fresh: Pages,
        checkpoints: Sequence[Checkpoint],
    ) -> None:
        """Fill the pages after a match and insert them into the tree, in pieces that end where a window or state is."""
        tree, size = self._tiers.tree, self._tiers.page_size
        first, given = match.pages, 0
        pieces: list[tuple[int, Checkpoint | None]] = [(each.tokens // size - first, each) for each in checkpoints]
        try:
            self._copy_out(past, index, row, first, fresh)
            for end, checkpoint in pieces or [(len(fresh), None)]:
                if end <= given:
                    continue
                if given:
                    # What follows the match by now may be another session's, and still being loaded.
                    match = tree.settle(match)
                    if match.pages < first + given:
                        self._log_failed_load()
                        break
                begin, given = given, end
                windows = {} if checkpoint is None else checkpoint.windows(end - begin)
                try:
                    match = tree.insert(match, fresh[begin:end], windows=windows).match
                except ValueError:
                    # Nothing was taken. After any other error that is not known, and no page may have two owners.
                    given = begin
                    if checkpoint is not None:
                        checkpoint.take_back(windows)
                    raise
        finally:
            if given < len(fresh):
                tree.device_allocator.free_pages(fresh[given:])
            # An insert that was interrupted may have replaced it.
            with contextlib.suppress(ValueError):
                tree.release(match)

    def _log_failed_load(self) -> None:
        self._cache.log_once("a load failed while the session used it; its tokens were not cached")

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
