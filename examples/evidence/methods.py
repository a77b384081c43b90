# SPDX-License-Identifier: Apache-2.0
"""The merge methods that are judged, each at its default, and how one merges a family in memory."""

from __future__ import annotations

import ast
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from family import Family
from mergekit.common import ModelReference
from mergekit.merge_methods import merge_state_dicts
from torch import Tensor, nn

import mergekit_ace
from mergekit_ace.calibration.calibrate import CalibrateConfig, run_calibration
from mergekit_ace.files.saving import write_text
from mergekit_ace.score.score import merge_once
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.statistics import StatisticsConfig, measure_statistics
from mergekit_ace.training.train import run_training

State = dict[str, Tensor]
LEARNING_STEPS = 100  # of coefficients


@dataclass(frozen=True)
class Row:
    """A method's name in tables, its `merge_method`, and parameters that differ from its defaults.

    `samples` is how many unlabelled samples per expert coefficients are learned on; 0 for no data.
    With `own_texts` experts write texts, for `statistics` before a merge and `calibrate` after it.
    """

    name: str
    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    own_texts: bool = False

    @property
    def code(self) -> str:
        """What stands for code and parameters that a result comes from."""
        said = "".join(f" {name}={value}" for name, value in self.parameters.items())
        if self.method in ("task_arithmetic", "ties", "dare_ties"):
            return f"mergekit {version('mergekit')}{said}"
        learned = ["training"] * bool(self.samples)
        more = ["training", "calibration"] if self.own_texts else learned
        return code_digest("algebra", "methods", *more) + said


@cache
def code_digest(*folders: str) -> str:
    """Return eight digits that stand for the code in folders of the package, without its prose."""
    digest, package = hashlib.sha256(), Path(mergekit_ace.__file__).parent
    for file in sorted(file for folder in folders for file in (package / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:8]


# mergekit's own methods have no default weights; these are what their papers recommend.
ROWS = [
    Row("task_arithmetic", "task_arithmetic", {"weight": 0.4}),
    Row("ties", "ties", {"weight": 1.0, "density": 0.2}),
    Row("dare_ties", "dare_ties", {"weight": 0.4, "density": 0.3}),
    Row("consensus_ta", "consensus_ta"),
    Row("lines", "lines"),
    Row("tsv_m", "tsv_m"),
    Row("iso_c", "iso_c"),
    Row("iso_cts", "iso_cts"),
    Row("cart", "cart"),
    Row("actmat", "actmat"),
    Row("wudi", "wudi", {"solver": "exact"}),
    Row("ace", "ace"),
    Row("ace_plus", "ace_plus"),
    Row("ace as in the paper", "ace",
        {"epsilon_scale": "absolute", "heterogeneity": "gamma", "refinement_mean": "ridged"}),
    Row("statsmerging", "statsmerging", samples=128),
    Row("ace_plus, own texts", "ace_plus", own_texts=True),
]  # fmt: skip


def read_state(model: nn.Module) -> State:
    """Return a model's tensors, each under its first name only."""
    seen, state = set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head shares the embeddings' memory
            seen.add(tensor.data_ptr())
            state[name] = tensor.clone()
    return state


def merge_family(row: Row, family: Family, base: State, experts: Mapping[str, State]) -> State:
    """Return the merged tensors of a row at λ = 1."""
    if row.own_texts:
        state = read_state(family.load(improve_merge(row, family)))
        return {name: state[name] for name in base}
    origin = ModelReference.model_validate(str(family.base))
    models = {origin: base}
    for name, folder in family.experts.items():
        models[ModelReference.model_validate(str(folder))] = experts[name]
    parameters = dict(row.parameters)
    if family.adapters and row.method.startswith("ace"):
        parameters["side"] = "outputs"  # as the command does that sees adapters
    if family.layers and row.method == "lines":
        parameters["layers"] = family.layers
    if row.samples:
        parameters["coefficients"] = str(learn_coefficients(row, family))
    torch.manual_seed(family.seed)  # DARE drops entries at random
    with torch.no_grad():
        return merge_state_dicts(models, row.method, base=origin, parameters=parameters)


def learn_coefficients(row: Row, family: Family) -> Path:
    """Return the file of coefficients that the trainer learns."""
    folder = family.base.with_name(f"learned-{row.method}-{row.samples}-{row.code}")
    file = folder / "coefficients.safetensors"
    if not file.exists():
        settings = family.training_config(row.samples)
        settings["training"] = {"seed": family.seed, "max_steps": LEARNING_STEPS, "epochs": 100}
        run_training(TrainConfig.model_validate(settings), folder, quiet=True)
        shutil.rmtree(folder / "state", ignore_errors=True)
    return file


def improve_merge(row: Row, family: Family) -> Path:
    """Return the folder of a merge by `statistics`, `merge` and `calibrate`."""
    folder = family.base.with_name(f"improved {family.key} {row.code}".replace("/", "-"))
    if not folder.exists():
        work = folder.with_name(f"{folder.name}-work")
        models = [{"model": str(expert)} for expert in family.experts.values()]
        known: dict[str, Any] = {"base_model": str(family.base), "models": models}
        asked = StatisticsConfig.model_validate({**known, "task": "causal-lm"})
        measured = measure_statistics(asked, work / "statistics", quiet=True)
        merge = {**known, "merge_method": row.method, "dtype": "float32", "out_dtype": "bfloat16"}
        merge["parameters"] = {**row.parameters, "covariances": str(measured)}
        write_text(work / "merge.yml", yaml.safe_dump(merge))
        known["merged_model"] = merge_once(work / "merge.yml", work / "merged", quiet=True)
        run_calibration(CalibrateConfig.model_validate(known), folder, quiet=True)
        shutil.rmtree(work)
    return folder


@torch.no_grad()
def put_merge(model: nn.Module, base: State, merged: State, scale: float) -> None:
    """Write W0 + λ (merged − W0) into a model."""
    state = model.state_dict()
    for name, origin in base.items():
        if origin.is_floating_point():
            state[name].copy_(origin + scale * (merged[name].to(origin.device) - origin))
