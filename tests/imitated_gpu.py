# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: tensors that say `meta` for their device, and compute on the CPU.

As on a GPU, an operation on tensors of different devices raises an error, unless all on the CPU are
single numbers, and so does the conversion to NumPy. Free memory has a limit, and transfers for
which a program would have to wait are counted. Kernels and rounding are the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")
CPU = torch.device("cpu")
ATEN = torch.ops.aten
# These take tensors of two devices: copies, and indices.
BETWEEN_DEVICES = {ATEN.copy_, ATEN._to_copy, ATEN.index, ATEN.index_put_, ATEN._index_put_impl_}


class GpuTensor(Tensor):
    """A tensor of the imitated GPU; `values` are its numbers, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> GpuTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=GPU,
            requires_grad=False,
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        raise AssertionError(f"{operation} outside of imitated_gpu()")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.values!r})"


class ImitatedGpu(TorchDispatchMode):
    """Runs every operation where its tensors are; counts commands, waits and bytes in use."""

    def __init__(self, memory: float = math.inf):
        super().__init__()
        self.memory, self.waits, self.commands = memory, 0, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}  # memory, and its bytes

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        tensors: list[Tensor] = []

        def unwrap(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
            return value.values if isinstance(value, GpuTensor) else value

        plain_arguments, plain_options = _each((arguments, options), unwrap)
        on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        wanted = options.get("device")
        here = on_gpu if wanted is None else torch.device(wanted).type == GPU.type
        packet = operation.overloadpacket
        if on_gpu and packet not in BETWEEN_DEVICES:
            self._check_devices(packet, tensors)
        if on_gpu and (packet is ATEN._local_scalar_dense or not here):
            self.waits += 1
        if wanted is not None:
            plain_options["device"] = CPU
        results = operation(*plain_arguments, **plain_options)
        returned = [value.alias_info for value in operation._schema.returns]
        is_view = any(alias and not alias.is_write for alias in returned)
        self.commands += on_gpu and not is_view
        known = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, GpuTensor)}
        if packet is ATEN.copy_:
            here = isinstance(arguments[0], GpuTensor)
            self.waits += on_gpu and not here
        elif on_gpu and here and wanted is None and packet in BETWEEN_DEVICES:
            here = isinstance(arguments[0], GpuTensor)

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or not here:
                return value
            return known[id(value)] if id(value) in known else self._place(value)

        return _each(results, wrap)

    def _check_devices(self, packet: Any, tensors: list[Tensor]) -> None:
        strangers = [t for t in tensors if not isinstance(t, GpuTensor) and t.ndim > 0]
        if strangers:
            raise RuntimeError(
                f"{packet}: expected all tensors to be on the same device, but found {GPU} and "
                f"cpu, the latter of shape {tuple(strangers[0].shape)}"
            )

    def _place(self, values: Tensor) -> GpuTensor:
        storage = values.untyped_storage()
        held, size = StorageWeakRef(storage), storage.nbytes()
        if size and held.cdata not in self._held:
            # What is used takes long to count, so only where there is a limit.
            if self.memory < math.inf and size + self.used > self.memory:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            self._held[held.cdata] = held, size
        return GpuTensor(values)

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        self._held = {key: one for key, one in self._held.items() if not one[0].expired()}
        return sum(size for _, size in self._held.values())


class MadeFromNumbers(TorchFunctionMode):
    """Lets tensors be made from numbers on the GPU: they reach no dispatcher of operations."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if function is Tensor.new_tensor:
            like, *arguments = arguments
            options = {"dtype": like.dtype, "device": like.device, **options}
            function = torch.tensor
        if function is torch.tensor and torch.device(options.get("device") or CPU) == GPU:
            return torch.tensor(*arguments, **{**options, "device": CPU}).to(GPU)
        return function(*arguments, **options)


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in arguments; faster than torch's `tree_map`."""
    if isinstance(value, (tuple, list)):
        return type(value)([_each(item, function) for item in value])
    if isinstance(value, dict):
        return {key: _each(item, function) for key, item in value.items()}
    return function(value)


@contextmanager
def imitated_gpu(monkeypatch, memory: float = math.inf) -> Iterator[ImitatedGpu]:
    """Let torch have a GPU of so many bytes."""
    monkeypatch.setattr(torch, "autocast", lambda **_: nullcontext())  # mergekit turns it off
    with MadeFromNumbers(), ImitatedGpu(memory) as device:
        yield device
