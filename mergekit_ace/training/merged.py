# SPDX-License-Identifier: Apache-2.0
"""A model whose weights are the merge, and the gradient of its coefficients.

The merge θ_0 + Σ_k λ_k s_k Δ_k is linear in the coefficients, so for any loss
∂L/∂λ_k^l = s_k^l ⟨∂L/∂θ^l, Δ_k^l⟩. s_k tells whether the expert changed the tensor at all, and is
0 where it is the base in another precision. As soon as a parameter's gradient is ready, its K inner
products with the experts' task vectors are taken and the gradient is freed. Task vectors are formed
in blocks from the stored weights, so that beyond the model, its activations and one gradient there
is one block in memory, however many experts there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mergekit_ace.algebra.task_vectors import select_active
from mergekit_ace.training.config import Storage

# Entries that are read at once: 1 MiB in float32 stays in a core's cache. On a GPU every operation
# has to be launched, and every copy started.
BLOCK, DEVICE_BLOCK = 2**18, 2**24


class MergedModel:
    """Model that is written anew for given coefficients and collects their gradient.

    Attributes:
        module: the model; only merged parameters require gradients.
        names: of the L merged parameters.
        products: (K, L), float64: ∂L/∂λ, summed over backward passes since `clear`.
    """

    def __init__(
        self,
        module: nn.Module,
        base: Mapping[str, Tensor],
        experts: Sequence[Mapping[str, Tensor]],
        names: Sequence[str],
        storage: Storage = "disk",
        *,
        components: bool = False,
        small: int = 2**14,
        block: int | None = None,
    ):
        """
        Args:
            module: holds the parameters `names`; its other ones stay as they are.
            storage: ``disk``: read the weights where they are mapped; ``cpu``, ``device``: keep
                them, in their own dtype, in memory or where the parameter is.
            components: `experts` are the Δ_k themselves.
            small: up to so many entries (norms, biases) the task vectors of a tensor are kept. Its
                share of a model is nothing, but a dozen operations for each expert would take
                longer than its part of the network.
            block: entries of larger tensors that are read at once; by default see `BLOCK`.
        """
        self.module = module
        self.names = tuple(names)
        self._components, self._block = components, block
        self.parameters = [module.get_parameter(name) for name in names]
        self.products = torch.zeros(len(experts), len(names), dtype=torch.float64)
        self._changed = torch.ones(len(experts), len(names))  # s_k, as `merge_entries` has them
        for column, name in enumerate(names if not components else ()):
            versions = [expert[name] for expert in experts]
            ones = [1.0] * len(versions)
            changed = select_active(base[name], versions, ones, torch.float32).changed
            self._changed[:, column] = torch.tensor(changed)
        self._base, *self._experts = (self._store(w, storage) for w in (base, *experts))
        self._partial: list[Tensor | None] = [None] * len(names)
        # All at once, before anything large: small blocks between gradients would pin their memory.
        self._small = {
            column: self._read_small(column)
            for column, parameter in enumerate(self.parameters)
            if parameter.numel() <= small
        }
        module.requires_grad_(False)
        for column, parameter in enumerate(self.parameters):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._reduce, column))

    @torch.no_grad()
    def write(self, coefficients: Tensor) -> None:
        """Set every merged parameter to θ_0 + Σ_k λ_k s_k Δ_k.

        Args:
            coefficients: λ, (K, L).
        """
        columns = (coefficients.detach().float().cpu() * self._changed).T.contiguous()
        for column, (parameter, row) in enumerate(
            zip(self.parameters, columns.tolist(), strict=True)
        ):
            flat = parameter.data.view(-1)
            if column in self._small:
                base, deltas = self._small[column]
                flat.copy_(base + columns[column].to(parameter.device) @ deltas)
                continue
            for part, base, deltas in self._blocks(column, parameter.device, row):
                total = base.to(torch.float32, copy=True)
                for coefficient, delta in deltas:
                    total.add_(delta, alpha=coefficient)
                flat[part].copy_(total)

    def clear(self) -> None:
        """Forget the gradient."""
        self.products.zero_()

    def collect(self) -> None:
        """Add what the last backward pass left on the devices to `products`."""
        for column, sums in enumerate(self._partial):
            if sums is not None:
                self.products[:, column] += sums.cpu().double() * self._changed[:, column]
        self._partial = [None] * len(self.names)

    @torch.no_grad()
    def _reduce(self, column: int, parameter: nn.Parameter) -> None:
        """Take the inner products of a gradient with all Δ_k, and free it."""
        gradient = parameter.grad.reshape(-1)
        if column in self._small:
            sums = self._small[column][1] @ gradient.float()
        else:
            # Apple's devices have no float64.
            wide = torch.float32 if parameter.device.type == "mps" else torch.float64
            sums = torch.zeros(len(self._experts), dtype=wide, device=parameter.device)
            ones = [1.0] * len(self._experts)
            for part, _, deltas in self._blocks(column, parameter.device, ones):
                piece = gradient[part].float()
                for expert, (_, delta) in enumerate(deltas):
                    sums[expert] += torch.dot(piece, delta)
        known = self._partial[column]
        self._partial[column] = sums if known is None else known + sums
        parameter.grad = None

    def _read_small(self, column: int) -> tuple[Tensor, Tensor]:
        """Read θ_0, (n,), and all Δ_k, (K, n), of a small tensor, in float32."""
        name, device = self.names[column], self.parameters[column].device
        base = self._base[name].reshape(-1).to(device, torch.float32, copy=True)
        experts = [expert[name].reshape(-1).to(device, torch.float32) for expert in self._experts]
        stacked = torch.stack(experts)
        return base, stacked if self._components else stacked - base

    def _blocks(
        self, column: int, device: torch.device, coefficients: Sequence[float]
    ) -> Iterator[tuple[slice, Tensor, Iterator[tuple[float, Tensor]]]]:
        """Yield blocks of a parameter: where, θ_0 there, the coefficients with their Δ_k there."""
        name = self.names[column]
        base = self._base[name].reshape(-1)
        experts = [expert[name].reshape(-1) for expert in self._experts]
        used = [(c, e) for c, e in zip(coefficients, experts, strict=True) if c != 0]
        length = self._block or (BLOCK if device.type == "cpu" else DEVICE_BLOCK)

        def delta(stored: Tensor, origin: Tensor) -> Tensor:  # in float32
            stored = stored.to(device, torch.float32)
            return stored if self._components else stored - origin.to(torch.float32)

        for start in range(0, len(base), length):
            part = slice(start, min(start + length, len(base)))
            origin = base[part].to(device)
            yield part, origin, ((c, delta(e[part], origin)) for c, e in used)

    def _store(self, weights: Mapping[str, Tensor], storage: Storage) -> Mapping[str, Tensor]:
        if storage == "disk":
            return weights
        kept = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            where = parameter.device if storage == "device" else "cpu"
            kept[name] = weights[name].to(where, copy=True)
        return kept
