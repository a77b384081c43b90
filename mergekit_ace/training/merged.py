# SPDX-License-Identifier: Apache-2.0
"""A model whose weights are the merge, and the gradient of its coefficients.

The merge θ_0 + Σ_k λ_k s_k Δ_k is linear in the coefficients, so for any loss
∂L/∂λ_k^l = s_k^l ⟨∂L/∂θ^l, Δ_k^l⟩. s_k tells whether the expert changed the tensor at all, and is
0 where it is the base in another precision. As soon as a parameter's gradient is ready, its K inner
products with the experts' task vectors are taken and the gradient is freed. Task vectors are formed
in blocks from the mapped weights, so that beyond the model, its activations and one gradient there
is one block of each expert in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mergekit_ace.algebra.task_vectors import select_active

# Entries that are read at once: 1 MiB in float32 stays in a core's cache. On a GPU every operation
# has to be launched, and every copy started.
BLOCK, DEVICE_BLOCK = 2**18, 2**22


class MergedModel:
    """Model that is written anew for given coefficients and collects their gradient.

    Attributes:
        module: the model; only merged parameters require gradients.
        products: (K, L), float64: ∂L/∂λ, summed over backward passes since `clear`.
    """

    def __init__(
        self,
        module: nn.Module,
        base: Mapping[str, Tensor],
        experts: Sequence[Mapping[str, Tensor]],
        names: Sequence[str],
        *,
        components: bool = False,
    ):
        """
        Args:
            module: holds the L parameters `names`; its other ones stay as they are.
            base, experts: weights by name, read where they are mapped.
            components: `experts` are the Δ_k themselves.
        """
        self.module = module
        self.products = torch.zeros(len(experts), len(names), dtype=torch.float64)
        self._base, self._experts, self._names = base, experts, tuple(names)
        self._components = components
        self._parameters = [module.get_parameter(name) for name in names]
        self._changed = torch.ones(len(experts), len(names))  # s_k, as `merge_entries` has them
        for column, name in enumerate(names if not components else ()):
            versions = [expert[name] for expert in experts]
            active = select_active(base[name], versions, [1.0] * len(versions), torch.float32)
            self._changed[:, column] = torch.tensor(active.changed)
        # On the devices, until `collect`: a copy from there would end the overlap of their work.
        self._sums: dict[int, Tensor] = {}
        module.requires_grad_(False)
        for column, parameter in enumerate(self._parameters):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._reduce, column))

    @torch.no_grad()
    def write(self, coefficients: Tensor) -> None:
        """Set every merged parameter to θ_0 + Σ_k λ_k s_k Δ_k.

        Args:
            coefficients: λ, (K, L).
        """
        used = (coefficients.detach().float().cpu() * self._changed).T.contiguous()
        for column, parameter in enumerate(self._parameters):
            flat, row = parameter.data.view(-1), used[column].to(parameter.device)
            for part, base, deltas in self._blocks(column, parameter.device):
                flat[part].copy_(base + row @ deltas)

    def clear(self) -> None:
        """Forget the gradient."""
        self.products.zero_()

    def collect(self) -> None:
        """Add what the last backward pass left on the devices to `products`."""
        for column, sums in self._sums.items():
            self.products[:, column] += sums.cpu().double() * self._changed[:, column]
        self._sums.clear()

    @torch.no_grad()
    def _reduce(self, column: int, parameter: nn.Parameter) -> None:
        """Take the inner products of a gradient with all Δ_k, and free it."""
        gradient = parameter.grad.reshape(-1)
        # Apple's devices have no float64.
        wide = torch.float32 if parameter.device.type == "mps" else torch.float64
        nothing = torch.zeros(len(self._experts), dtype=wide, device=parameter.device)
        sums = self._sums.setdefault(column, nothing)
        for part, _, deltas in self._blocks(column, parameter.device):
            sums += deltas @ gradient[part].float()
        parameter.grad = None

    def _blocks(self, column: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of a parameter in float32: where, θ_0 there, (n,), and all Δ_k, (K, n)."""
        name = self._names[column]
        base, *experts = (w[name].reshape(-1) for w in (self._base, *self._experts))
        length = BLOCK if device.type == "cpu" else DEVICE_BLOCK
        for start in range(0, len(base), length):
            part = slice(start, min(start + length, len(base)))
            origin = base[part].to(device, torch.float32)
            deltas = torch.stack([expert[part].to(device, torch.float32) for expert in experts])
            yield part, origin, deltas if self._components else deltas.sub_(origin)
