"""MHATokenToKVPool: keys and values of multi-head (also grouped-query and sliding-window) attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from hicache_kernels.validation import one_of, whole

from .base import DevicePool, DevicePoolOptions
from .components import BufferForm, checked_layers, component_from_tensors


class MHATokenToKVPool(DevicePool):
    """K and V rows of one size each, ``head_num * head_dim`` values.

    A sliding-window pool is one of these with its own slots.

    Parameters
    ----------
    size, page_size
        Slots to allocate, and slots a page.
    dtype
        Of keys and values.
    head_num, head_dim, layer_num
        Shape of a key, and number of layers.
    device
        Where to allocate.
    v_head_dim
        Head dimension of the values where it differs.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    k_buffer, v_buffer
        Keys and values, one tensor a layer, in the form they were given.
    head_num, head_dim, v_head_dim
        Shape of an element.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        *,
        v_head_dim: int | None = None,
        **options: Unpack[DevicePoolOptions],
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        for name, value in (
            ("size", size),
            ("page_size", page_size),
            ("head_num", head_num),
            ("head_dim", head_dim),
            ("layer_num", layer_num),
            ("v_head_dim", v_head_dim),
        ):
            whole(name, value)
        k, v = (
            [torch.zeros((size, head_num, dim), dtype=dtype, device=device) for _ in range(layer_num)]
            for dim in (head_dim, v_head_dim)
        )
        self._describe_keys_and_values(k, v, BufferForm.SLOT_MAJOR, page_size, **options)

    @classmethod
    def from_buffers(
        cls,
        *,
        k: Sequence[torch.Tensor] | None = None,
        v: Sequence[torch.Tensor] | None = None,
        kv: Sequence[torch.Tensor] | None = None,
        page_size: int,
        form: BufferForm | str | None = None,
        index_translation: torch.Tensor | None = None,
    ) -> MHATokenToKVPool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        k, v
            One tensor a layer: ``[slots, heads, dim]``, ``[blocks, block, heads, dim]``, or ``[heads, slots, dim]``
            with ``form="head_major"``, or ``[blocks, heads, block, dim]`` with ``form="block_head_major"``. K and V may
            differ in their head dimension; dimensions before the element may be strided, and in blocks the heads too.
        kv
            Instead of both, one tensor a layer with K and V together: ``[2, blocks, block, heads, dim]``,
            ``[blocks, 2, block, heads, dim]`` or ``[2, slots, heads, dim]``. With two blocks the first is meant; views
            passed as ``k`` and ``v`` make the second. With ``form="block_head_major"``,
            ``[blocks, heads, block, 2 * dim]``, where the values of a head follow its keys.
        page_size
            Slots a page.
        form
            :class:`BufferForm`; by default read off the number of dimensions, where three mean slot-major.
        index_translation
            See :class:`DevicePool`.
        """
        form = None if form is None else one_of("form", form, BufferForm)
        if kv is not None:
            if k is not None or v is not None:
                raise ValueError("kv is given together with k or v; pass either kv, or both k and v")
            k, v, joint_form = _split_keys_and_values(kv, form)
            if form is not None and form is not joint_form:
                raise ValueError(f"form is {form.value!r}; kv of shape {tuple(kv[0].shape)} is {joint_form.value}")
            form = joint_form
        elif k is None or v is None:
            raise ValueError(f"{'k' if k is None else 'v'} is None; pass either kv, or both k and v")
        pool = cls.__new__(cls)
        pool._describe_keys_and_values(k, v, form, page_size, index_translation)
        return pool

    def _describe_keys_and_values(
        self,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        form: BufferForm | None,
        page_size: int,
        index_translation: torch.Tensor | None = None,
    ) -> None:
        components = []
        for name, tensors in (("k", k), ("v", v)):
            dims = checked_layers(name, tensors)[0].dim()
            component = component_from_tensors(name, tensors, form or _form_of(name, dims))
            if len(component.element_shape) != 2:
                raise ValueError(
                    f"{name} has shape {tuple(tensors[0].shape)}; accepted are [slots, heads, dim], "
                    "[blocks, block, heads, dim] and, head-major, [heads, slots, dim]"
                )
            components.append(component)
        self.describe(components, page_size, index_translation)
        self.k_buffer = list(k)
        self.v_buffer = list(v)
        self.head_num, self.head_dim = components[0].element_shape
        self.v_head_dim = components[1].element_shape[1]


def _form_of(name: str, dims: int) -> BufferForm:
    forms = {3: BufferForm.SLOT_MAJOR, 4: BufferForm.BLOCK_MAJOR}
    if dims not in forms:
        raise ValueError(
            f"{name} has {dims} dimensions; accepted are [slots, heads, dim], [blocks, block, heads, dim] and, "
            "head-major, [heads, slots, dim]"
        )
    return forms[dims]


def _split_keys_and_values(
    kv: Sequence[torch.Tensor], form: BufferForm | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], BufferForm]:
    shape = tuple(checked_layers("kv", kv)[0].shape)
    if form is BufferForm.BLOCK_HEAD_MAJOR:
        if len(shape) != 4 or shape[3] % 2:
            raise ValueError(f"kv has shape {shape}; block-head-major is [blocks, heads, block, 2 * dim]")
        return [t[..., : shape[3] // 2] for t in kv], [t[..., shape[3] // 2 :] for t in kv], form
    if len(shape) in (4, 5) and shape[0] == 2:
        dim = 0
    elif len(shape) == 5 and shape[1] == 2:
        dim = 1
    else:
        raise ValueError(
            f"kv has shape {shape}; accepted are [2, blocks, block, heads, dim], [blocks, 2, block, heads, dim], "
            "[2, slots, heads, dim] and, with form='block_head_major', [blocks, heads, block, 2 * dim]"
        )
    form = BufferForm.SLOT_MAJOR if len(shape) == 4 else BufferForm.BLOCK_MAJOR
    return [t.select(dim, 0) for t in kv], [t.select(dim, 1) for t in kv], form
