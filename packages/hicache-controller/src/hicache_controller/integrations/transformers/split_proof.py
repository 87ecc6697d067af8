"""Proof that a model computes a prompt in several passes as in one: a restored prefix is the first of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .layers import WindowAttention
from .model_layout import ModelLayout, cache_argument, decoder_of, first_line, takes_positions
from .past import PastCache

MIN_PAGE, MAX_PAGE = 16, 256
"""Tokens between cuts: fewer prove little, and more only take time."""

NOISE_FACTOR = 3.0
"""How many times the measured noise still counts as noise. Models of 3 to 24 layers that are right, with experts and
without, reached 0.5 times the noise in bfloat16 and float16 and 0.75 in float32, and those that are wrong 20 to 100,000
times in float32."""

MIN_ROUNDING = 2.0**-20
"""What a rounding changes at least, as a part of a value: norms and rotations are computed in float32 whatever the
type, and sums of thousands of terms lose three of its bits."""

REACHES = ("index_topk", "mamba_chunk_size", "chunk_size")
"""Fields of a configuration that say, as windows do, after how many tokens a layer computes differently."""

LIMITS = ("max_position_embeddings", "max_seq_len")
"""Fields of a configuration that say how many tokens a prompt may have."""


class Verdict(NamedTuple):
    """What a proof found.

    Attributes
    ----------
    reason
        Why the model cannot continue a restored prefix; None where it can.
    needs_positions
        Whether it can only with ``position_ids``: without them it counts every pass from 0.
    """

    reason: str | None = None
    needs_positions: bool = False


class Rows(NamedTuple):
    """What passes left of the last tokens, or of all: a name for messages, and values ``[tokens, ...]``."""

    name: str
    values: torch.Tensor


_verdicts: dict[tuple[object, ...], Verdict] = {}


def split_verdict(model: Any, layout: ModelLayout, page_size: int) -> Verdict:
    """Compute random tokens in one pass and in several, once a process for each configuration, version and dtype.

    The keys and values of every layer and the last hidden states, from which the logits of each token follow, have to
    agree as far as rounding lets them. The random state of torch is left as it was.

    Parameters
    ----------
    model, layout
        The model, and what its layers keep.
    page_size
        Tokens a page: prompts are cut at page boundaries and inside pages.

    Raises
    ------
    RuntimeError
        If the model is in training mode.
    """
    if model.training:
        raise RuntimeError("the model is in training mode, where dropout changes what is computed; call model.eval()")
    key = (
        type(model),
        repr(model.config.to_dict()),
        model.config._attn_implementation,
        model.config.get_text_config(decoder=True)._attn_implementation,
        transformers.__version__,
        torch.__version__,
        model.dtype,
        layout.device.type,
    )
    if key not in _verdicts:
        _verdicts[key] = _prove(model, layout, page_size)
    return _verdicts[key]


def cut_prompts(page_size: int, reach: int, limit: int) -> tuple[tuple[int, ...], ...]:
    """Return where the passes of each proof end; all proofs end at the same token.

    Parameters
    ----------
    page_size
        Tokens a page.
    reach
        Tokens of a window, or of whatever else changes how a layer computes.
    limit
        Tokens that a prompt of the model may have.
    """
    page = min(MAX_PAGE, page_size * -(-MIN_PAGE // page_size))
    far = max(2, reach // page + 1) * page
    inside = page + page // 2 + 1
    end = min(far + page // 2 + 5, limit)
    cuts = ((page, inside, inside + 2, inside + 3), (far, far + 3, far + 4))
    return tuple((*(cut for cut in each if cut < end), end) for each in cuts)


def _prove(model: Any, layout: ModelLayout, page_size: int) -> Verdict:
    device, config = layout.device, model.config.get_text_config(decoder=True)
    reach = max([layer.window for layer in layout.layers] + _numbers(config, REACHES))
    chains = cut_prompts(page_size, reach, min(_numbers(config, LIMITS), default=1 << 30))
    generator = torch.Generator().manual_seed(0)
    reason: str | None = None
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
            # cuDNN plans each shape anew, which would take most of the time; it is not what is looked at here.
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ):
            for positions in (False, True) if takes_positions(decoder_of(model).forward) else (False,):

                def differs(positions: bool = positions) -> str | None:
                    tokens = _random_tokens(model, (2, chains[0][-1]), generator).to(device)
                    try:
                        return _difference(model, layout, tokens, chains, positions)
                    except torch.OutOfMemoryError:
                        raise
                    except Exception as error:
                        return f"{type(error).__name__}: {first_line(error)}"

                # A choice between near equals, of an expert or of what an indexer keeps, may be another one: a prompt
                # that differs counts unless two others agree.
                reason = differs()
                if reason is None or (reason := differs() or differs()) is None:
                    return Verdict(needs_positions=positions)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Verdict(
        f"{type(model).__name__} of transformers {transformers.__version__} computes a prompt in several passes "
        f"differently from one: {reason}. A restored prefix is the first of several passes, so sessions would give "
        "other logits than the model does without them. Generate without the cache, as on_unsupported='uncached' does, "
        "or use a version of transformers that is right for this model; check_passes=False skips this check"
    )


def _difference(
    model: Any, layout: ModelLayout, tokens: torch.Tensor, chains: Sequence[Sequence[int]], positions: bool
) -> str | None:
    """Say what differs between one pass over the first of two prompts and several; None where nothing does.

    Noise is what the same pass gives next to another prompt, with every embedding changed by one rounding; as it grows
    from layer to layer, so does what is allowed. What differs at some tokens alone, anywhere, is a choice between near
    equals, and adds to the noise of the layers after it. A model that is wrong differs at most tokens before or after
    the cuts, or at the first token after most cuts, in the first layer where anything differs.
    """
    whole, half = chains[0][-1:], chains[0][0]
    # As without sessions: positions are those that the model counts by itself.
    one = _run(model, tokens[:1], whole, DynamicCache(config=model.config))
    rounding = _rounding(layout)
    with _rounded_embeddings(model, rounding):
        noisy = _run(model, tokens, whole, DynamicCache(config=model.config))
    several = [_run(model, tokens[:1], ends, _new_cache(layout, model.config), positions) for ends in chains]
    other_end = torch.cat((tokens[:1, :half], tokens[1:, half:]), 1)
    changed_end = _run(model, other_end, whole, DynamicCache(config=model.config))
    noise = rounding
    for number, (name, values) in enumerate(one):
        if not bool(values.isfinite().all()):
            return f"{name} are not all finite"
        noise = max(noise, float(_distances(noisy[number].values, values).max()))
        allowed = NOISE_FACTOR * noise
        if len(values) == whole[0] and float(_distances(changed_end[number].values, values)[:half].median()) > allowed:
            return f"{name} depend on the tokens that follow, as in an encoder"
        for ends, rows in zip(chains, several, strict=True):
            distances = _distances(rows[number].values, values)
            if (typical := _typical(distances, ends)) > allowed:
                return (
                    f"of {ends[-1]} tokens in passes that end at {', '.join(map(str, ends[:-1]))}, {name} differ by "
                    f"{typical:.2g} of their size, and rounding explains {allowed:.2g}"
                )
            if (largest := float(distances.max())) > allowed:
                noise = max(noise, largest)
    return None


def _run(model: Any, tokens: torch.Tensor, ends: Sequence[int], cache: Any, positions: bool = False) -> list[Rows]:
    """Run tokens in passes; returns what these left of the first prompt, layer by layer."""
    decoder = decoder_of(model)
    hidden: list[torch.Tensor] = []
    begin = 0
    for end in ends:
        options = {cache_argument(decoder.forward): cache}
        if positions:
            options["position_ids"] = torch.arange(begin, end, device=tokens.device).expand(len(tokens), -1)
        hidden.append(decoder(input_ids=tokens[:, begin:end], use_cache=True, **options)[0][0])
        begin = end
    found: list[Rows] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            found.append(Rows(f"the keys of layer {number}", layer.keys[0].transpose(0, 1)))
            found.append(Rows(f"the values of layer {number}", layer.values[0].transpose(0, 1)))
    return [*found, Rows("the last hidden states", torch.cat(hidden))]


def _new_cache(layout: ModelLayout, config: Any) -> PastCache:
    cache = PastCache(layout, config)
    for layer in cache.layers:
        if isinstance(layer, WindowAttention):
            layer.retained = layer.sliding_window
    return cache


def _distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far the values of each token are apart, as a part of their size, or of the median size if larger."""
    dtype = torch.promote_types(expected.dtype, torch.float32)
    rows = expected.flatten(1).to(dtype)
    sizes: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    distances: torch.Tensor = torch.linalg.vector_norm(found.flatten(1).to(dtype) - rows, dim=-1)
    return distances.div(sizes.maximum(sizes.median()).clamp(min=torch.finfo(dtype).tiny))


def _typical(distances: torch.Tensor, ends: Sequence[int]) -> float:
    """Return the largest of three medians: of the tokens before the first cut, after it, and directly after a cut."""
    first = ends[-1] - len(distances)
    cuts = [cut - first for cut in ends[:-1] if cut >= first]
    begin = cuts[0] if cuts else len(distances)
    parts = (distances[:begin], distances[begin:], distances[cuts])
    return max(float(part.median()) for part in parts if len(part))


def _rounding(layout: ModelLayout) -> float:
    """Return how much a rounding changes a value, by the type or by how the device multiplies, as with TF32."""
    dtype = next(layer.attention.key.dtype for layer in layout.layers if layer.attention is not None)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    error = float(((a.to(layout.device) @ b.to(layout.device)).cpu().double() - exact).norm() / exact.norm())
    return max(error, torch.finfo(dtype).eps, MIN_ROUNDING)


@contextmanager
def _rounded_embeddings(model: Any, rounding: float) -> Iterator[None]:
    """Change every embedding by one rounding up or down."""

    def change(module: Any, arguments: Any, output: Any) -> Any:
        signs = torch.randint(2, output.shape[-1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
        return (output * (1 + rounding * signs.to(output.device))).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _numbers(config: Any, names: Sequence[str]) -> list[int]:
    """Return those fields of a configuration that are numbers."""
    return [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]


def _random_tokens(model: Any, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw tokens that the model has embeddings of, other than padding, from which some models count positions."""
    config = model.config.get_text_config(decoder=True)
    count = min(_numbers(config, ("vocab_size",)) + _numbers(model.get_input_embeddings(), ("num_embeddings",)))
    tokens = torch.randint(count - 1, shape, generator=generator)
    padding = getattr(config, "pad_token_id", None)
    return tokens + (tokens >= (count if padding is None else padding)).long()
