# SPDX-License-Identifier: Apache-2.0
"""The `adapter_config.json` of a result: by which names and ranks PEFT finds its modules again."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from torch import nn

from mergekit_ace.adapters.peft_adapter import Adapter

_NO_MODULES = "dummy-target-modules"  # PEFT's word for an adapter of saved modules alone


@dataclass
class Written:
    """What a file of tensors holds.

    Attributes:
        modules: rank by module whose weight has factors.
        parameters: rank by parameter of `target_parameters`.
        saved: modules that are held whole.
        biases: modules whose trained bias is held, and nothing else.
        lora_bias: whether something is added to the biases of the modules with factors.
        transposed: whether there are Conv1D among these.
    """

    modules: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    biases: set[str] = field(default_factory=set)
    lora_bias: bool = False
    transposed: bool = False


def config_text(
    written: Written, adapters: Sequence[Adapter], base: str, revision: str | None
) -> str:
    """Return the config of an adapter whose every factor counts as it is stored.

    Args:
        written: what its tensors are.
        adapters: that were merged, for what does not follow from the tensors.
        base: the model that it belongs to, a folder or a name on the Hub.
        revision: of the base.
    """
    rank = _common_rank(written)
    patterns = _rank_pattern({**written.modules, **written.parameters}, rank)
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=patterns,
        alpha_pattern=dict(patterns),
        target_modules=_target_modules(written, _network(adapters)),
        modules_to_save=sorted(written.saved) or None,
        bias=_bias(written),
        fan_in_fan_out=written.transposed,
        task_type=_same(adapter.config.task_type for adapter in adapters),
        auto_mapping=_same(adapter.config.auto_mapping for adapter in adapters),
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )
    if written.lora_bias:
        config.lora_bias = True
    if written.saved and all(_ties(adapter) for adapter in adapters):
        config.ensure_weight_tying = True
    if written.parameters:
        config.target_parameters = _target_parameters(written, _network(adapters))
    return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted) + "\n"


def shortest_endings(chosen: Collection[str], everything: Iterable[str]) -> dict[str, str] | None:
    """Return the shortest ending of every name that nothing but chosen names have.

    Args:
        chosen: dotted names.
        everything: all names, the chosen ones among them.

    Returns:
        Ending by name; None if a chosen name is itself the ending of one that is not chosen.
    """
    ours, all_of_them = (
        Counter(ending for name in names for ending in _endings(name))
        for names in (chosen, everything)
    )
    found = {}
    for name in chosen:
        exact = [ending for ending in _endings(name) if ours[ending] == all_of_them[ending]]
        if not exact:
            return None
        found[name] = exact[0]
    return found


def _endings(name: str) -> list[str]:
    """Return a dotted name without its first parts, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]


def _common_rank(written: Written) -> int:
    """Return `r`: the largest rank, which vLLM takes for all, or that of most parameters.

    PEFT warns of a `rank_pattern` for parameters, though it follows it.
    """
    if written.parameters:
        return Counter(written.parameters.values()).most_common(1)[0][0]
    return max(written.modules.values(), default=1)


def _rank_pattern(ranks: Mapping[str, int], common: int) -> dict[str, int]:
    """Return the ranks that differ from `r`, by expressions that match no other module.

    PEFT matches a key with the end of a name, in the order of the keys.
    """
    pattern = {}
    for rank in sorted(set(ranks.values()) - {common}):
        names = [name for name, own in ranks.items() if own == rank]
        endings = shortest_endings(names, ranks)
        keys = map(re.escape, endings.values()) if endings else (f"^{re.escape(n)}" for n in names)
        pattern.update(dict.fromkeys(keys, rank))
    return pattern


def _target_modules(written: Written, network: nn.Module | None) -> list[str] | str | None:
    """Return what PEFT finds the modules by: short names where these are exact, or full ones."""
    if not written.modules:
        return None if written.parameters else _NO_MODULES
    if network is None:
        return sorted(written.modules)
    endings = shortest_endings(written.modules, [name for name, _ in network.named_modules()])
    if endings is None:
        return "|".join(map(re.escape, written.modules))
    return sorted(set(endings.values()))


def _target_parameters(written: Written, network: nn.Module | None) -> list[str]:
    everything = [name for name, _ in network.named_parameters()] if network is not None else ()
    endings = shortest_endings(written.parameters, everything or written.parameters)
    return sorted(set(endings.values()) if everything and endings else written.parameters)


def _bias(written: Written) -> str:
    if not written.biases:
        return "none"
    return "lora_only" if written.biases <= set(written.modules) else "all"


def _network(adapters: Sequence[Adapter]) -> nn.Module | None:
    return next((a.network for a in adapters if a.network is not None), None)


def _ties(adapter: Adapter) -> bool:
    """Return whether PEFT keeps the table and the head of an adapter's model as one."""
    return getattr(adapter.config, "ensure_weight_tying", False)


def _same(values: Iterable[Any]) -> Any:
    """Return what all adapters have, or None."""
    first, *others = values
    return first if all(other == first for other in others) else None
