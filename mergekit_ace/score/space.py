# SPDX-License-Identifier: Apache-2.0
"""Merges that are linear in what is searched: as sums of a few models in memory, and as configs.

With λ and weights w_k a merge is W0 + λ (X + Σ_k (w_k − 1) X_k), where X is what the method adds at
λ = 1, and X_k what expert k adds to that. X and all X_k are merged once, each as a model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit import merge_methods

from mergekit_ace.algebra.learner import LearnerConfig
from mergekit_ace.files.checkpoints import read_headers
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.merge_config import read_merge_config
from mergekit_ace.methods.coefficients import CoefficientFile, Contents
from mergekit_ace.naming import ConfigError, block_of, relative_depths, short_names
from mergekit_ace.score.config import ScoreConfig, SearchSpace
from mergekit_ace.score.score import KIND, merge_once
from mergekit_ace.training.config import COMPONENTS
from mergekit_ace.training.family import MergedModel
from mergekit_ace.training.models import Weights, load_model, map_weights, model_paths

THIRDS = ("first", "middle", "last")
# What names of tensors hold, by their kind.
KINDS = {
    "attention": ("attn", "attention."),
    "mlp": ("mlp", "feed_forward"),
    "embedding": ("embed", "wte", "wpe", "lm_head"),
}


class SearchedMerge:
    """A merge config, with what is searched of it.

    Attributes:
        experts: those whose weights are searched; none where only λ is.
        inputs: paths of all models and files that the config names.
        ranges: of the parameters that are searched, by name; known once `load` was called.
    """

    def __init__(self, path: Path, space: SearchSpace, base_model: str):
        """Read a config; a `ConfigError` says why it cannot be searched."""
        config = read_merge_config(path)
        self.name, self.method, self._space = path.stem, config.merge_method, space
        self._content = yaml.safe_load(config.source)
        kind = merge_methods.get(self.method)
        scaled = any(parameter.name == "lambda" for parameter in kind.spec.parameters)
        parameters = {**(config.parameters or {})}
        named = (value for name, value in parameters.items() if name != "report")
        files = [one for one in named if isinstance(one, str) and os.path.isfile(one)]
        self.inputs = [*model_paths(config.referenced_models()), *files]
        mistake = ""
        if not scaled or not getattr(kind, "scales_all", True):
            mistake = f"{self.method} has no λ that scales all that is merged; use another method"
        elif config.models is None or config.base_model is None:
            mistake = "a search needs `base_model:` and a list of `models:`"
        elif os.path.realpath(str(config.base_model)) != os.path.realpath(base_model):
            mistake = f"its base model is {config.base_model}, and that of the score {base_model}"
        self.experts, self._places, self._side = list[str](), list[int](), "inputs"
        if space.weight is not None and self.method in (*COMPONENTS, "task_arithmetic"):
            models = {n: one for n, one in enumerate(config.models or ())
                      if one.model != config.base_model}  # fmt: skip
            self._places, self.experts = [*models], [str(one.model) for one in models.values()]
            if all(one.model.lora for one in models.values()):  # as `side: auto` has it
                self._side = "outputs"
            odd = {"coefficients", "covariances", "normalize", "side"} & parameters.keys()
            own = (one.parameters or {} for one in models.values())
            if any(not isinstance(one.get("weight", 1), int | float) for one in (parameters, *own)):
                odd.add("weight")
            if odd:
                mistake = f"weights cannot be searched with this `{min(odd)}`; leave it out"
        if mistake:
            raise ConfigError(f"{path}: {mistake}")
        self._labels = [f"weight.{one}" for one in short_names(self.experts)]
        # Of ace and ace_plus, whose experts have coefficients in a file.
        self._has_components = bool(self.experts) and self.method in COMPONENTS

    def make(self, out: Path, *, trust: bool = False, quiet: bool) -> None:
        """Merge X, and X_k of every expert, in float32; what is there stays."""
        out.mkdir(parents=True, exist_ok=True)
        count, self._folders, self._tensors = len(self.experts), [], []
        for number, weights in enumerate([[1.0] * count, *torch.eye(count).tolist()]):
            path = out / f"{self.name}-{number}.yml"
            content = self._config(1.0, weights, path.with_suffix(".safetensors"))
            content["dtype"] = "float32"
            content.pop("out_dtype", None)
            content["parameters"].pop("report", None)
            write_text(path, yaml.safe_dump(content, sort_keys=False))
            folder = merge_once(path, path.with_suffix(""), trust=trust, quiet=quiet)
            self._folders.append(folder)
            self._tensors = self._tensors or [*read_headers(Path(self._folders[0]))]

    def load(self, module: Any, base: Weights, config: ScoreConfig) -> None:
        """Map X and X_k from disk, to be added in `module`, which has the base's weights."""
        names, models = [*base], []
        for folder in self._folders:
            model = load_model(folder, KIND, config, torch.float32)
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            if shapes != {name: base[name].shape for name in names}:
                said = f"{self.name}: the merge has other shapes than the base"
                raise ConfigError(f"{said}; leave `tokenizer` settings out")
            # in its folder: a merge that is renewed drops what lies there
            models.append(map_weights(model, names, folder, Path(folder, "mapped.safetensors")))
        self._merged = MergedModel(module, base, models, names)
        self._groups = self._groups_of(names)
        groups = [*self._groups.values(), *self._groups_of(self._tensors).values()]
        self.ranges = dict.fromkeys(groups, self._space.scale)
        if self._space.weight is not None:
            self.ranges |= dict.fromkeys(self._labels, self._space.weight)

    def set(self, values: Mapping[str, float]) -> None:
        """Write the merge with these parameters into the module."""
        scales = torch.tensor([values[group] for group in self._groups.values()])
        factors = torch.tensor([1.0, *(values[label] - 1 for label in self._labels)])
        self._merged.write(factors[:, None] * scales)

    def write(self, values: Mapping[str, float], out: Path, comment: str) -> None:
        """Write `merge.yml`, and its coefficients if it has some."""
        coefficients = out / "coefficients.safetensors"
        coefficients.unlink(missing_ok=True)
        scales = {name: values[group] for name, group in self._groups_of(self._tensors).items()}
        weights = [values[label] for label in self._labels]
        content = self._config(scale_setting(scales), weights, coefficients)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_text(out / "merge.yml", f"# {comment}\n{text}")

    def _config(self, scale: Any, weights: Sequence[float], coefficients: Path) -> dict[str, Any]:
        """Return the config with another λ and weights, those of ace in a file, made if missing."""
        content = deepcopy(self._content)
        parameters = content["parameters"] = {**(content.get("parameters") or {}), "lambda": scale}
        if self._has_components:
            parameters["side"] = self._side
            if set(weights) != {1.0}:
                parameters["coefficients"] = str(coefficients.resolve())
                if not coefficients.exists():  # else a merge by them would begin anew
                    self._write_coefficients(coefficients, weights)
        else:
            usual = parameters.get("weight", 1.0)
            for place, weight in zip(self._places, weights, strict=True):
                model = content["models"][place]
                given = model.get("parameters") or {}
                model["parameters"] = {**given, "weight": given.get("weight", usual) * weight}
        return content

    def _write_coefficients(self, path: Path, weights: Sequence[float]) -> None:
        """Write weights as coefficients of components; a refinement counts where all experts do."""
        rows = [*weights, float(all(weights))] if self.method == "ace" else weights
        coefficients = torch.tensor(rows)[:, None].repeat(1, len(self._tensors))
        contents = Contents(
            base_model=str(self._content["base_model"]),
            experts=tuple(Expert(task=model, model=model) for model in self.experts),
            tensors=tuple(MergedTensor(name=name, stored=(name,)) for name in self._tensors),
            basis=self.method,  # type: ignore
            parameters={"side": self._side},
            learner=LearnerConfig(input="direct", statistics=("mean",)),
        )
        CoefficientFile(contents, coefficients, {}).save(path)

    def _groups_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the parameter that is the λ of each tensor."""
        groups = {}
        for name, depth in relative_depths(names).items():
            parts = ["lambda"]
            if "depth" in self._space.by:
                parts.append(THIRDS[min(int(3 * depth), 2)])
            if "kind" in self._space.by:
                kinds = (kind for kind, marks in KINDS.items() if any(m in name for m in marks))
                parts.append(next(kinds, "other"))
            groups[name] = ".".join(parts)
        return groups


def scale_setting(scales: Mapping[str, float]) -> Any:
    """Return λ of tensors by name as mergekit has it: one number, or filters by parts of names."""
    if len({*scales.values()}) == 1:
        return next(iter(scales.values()))
    blocks = defaultdict(set)
    for name, scale in scales.items():
        blocks[f"{block_of(name)}."].add(scale)
    filters = {}
    for name, scale in scales.items():
        block = f"{block_of(name)}."
        filters[block if block in name and len(blocks[block]) == 1 else name] = scale
    # The first filter that is part of a name decides: the longest first.
    ordered = sorted(filters, key=len, reverse=True)
    return [{"filter": part, "value": filters[part]} for part in ordered]
