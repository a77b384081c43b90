# SPDX-License-Identifier: Apache-2.0
"""`merge_method: statsmerging` through mergekit's own commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from coefficient_files import make_file
from commands import command
from families import tensors

from mergekit_ace.algebra.learner import LearnerConfig, features, measure_moments
from mergekit_ace.naming import ConfigError, relative_depths


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    return save_family(tiny_llama(), tmp_path_factory.mktemp("family"), experts=3)


@pytest.fixture
def names(family) -> list[str]:
    return list(tensors(family[0]))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "c.safetensors"


def config(family, parameters=None, experts=None, **more) -> dict:
    models = [{"model": path} for path in family[1:]]
    for model, own in zip(models, experts or (), strict=False):
        model["parameters"] = own
    return ace_config(
        family, merge_method="statsmerging", models=models, parameters=parameters or {}, **more
    )


def check(family, merged, coefficients) -> None:
    """Against the formula in float64; `coefficients` gives K numbers for a name."""
    base, *experts = (tensors(path) for path in family)
    got = tensors(merged)
    assert got.keys() == base.keys()
    for name, origin in base.items():
        expected = origin.double()
        for coefficient, expert in zip(coefficients(name), experts, strict=True):
            expected = expected + float(coefficient) * (expert[name].double() - origin.double())
        torch.testing.assert_close(got[name].double(), expected, rtol=3e-7, atol=3e-7)


def test_coefficients_of_a_file(family, names, path, mergekit_yaml):
    """Of models that have moved since, in another order."""
    frozen = ["lm_head.weight", "model.norm.weight"]
    known = [name for name in names if name not in frozen]
    file = make_file(known, ["org/x", "org/y", "org/z"], tasks=["x", "y", "z"], frozen=frozen)
    file.save(path)
    tasks = [{"task": "z"}, {"task": "x"}, {"task": "y"}]
    merged = mergekit_yaml(config(family, {"coefficients": str(path)}, tasks))
    rows = {name: file.coefficients[[2, 0, 1], n] for name, n in file.columns.items()}
    check(family, merged, lambda name: rows.get(name, [0.0] * 3))
    for name in frozen:
        assert torch.equal(tensors(merged)[name], tensors(family[0])[name])
    card = (merged / "README.md").read_text()
    assert "StatsMerging" in card
    assert "2506.04567" in card


def test_weights_in_the_config(family, mergekit_yaml):
    weights = [
        {"weight": [{"filter": "mlp", "value": -0.5}, {"value": 1}]},
        {"weight": 0},
        {"weight": "1e-1"},
    ]
    merged = mergekit_yaml(config(family, None, weights))
    check(family, merged, lambda name: (-0.5 if "mlp" in name else 1, 0, 0.1))


@pytest.mark.parametrize("what", ["task_vector", "weights"])
def test_a_learner_predicts_for_experts_it_never_saw(family, names, path, mergekit_yaml, what):
    learner = LearnerConfig(input="shared", hidden=8, statistics_of=what)
    file = make_file(["other.0.weight", "other.1.weight"], ["a", "b"], learner=learner)
    file.save(path)
    merged = mergekit_yaml(config(family, {"learner": str(path)}))
    base, *experts = (tensors(p) for p in family)
    depths = relative_depths(names)

    def predicted(name):
        rows = []
        for expert in experts:
            described = expert[name] - base[name] if what == "task_vector" else expert[name]
            rows.append(features(measure_moments(described, 3), learner.statistics, 3))
        statistics = torch.tensor(rows, dtype=torch.float64)[:, None]
        return file.learner(statistics, torch.tensor([depths[name]]))[:, 0]

    check(family, merged, predicted)
    assert len({tuple(predicted(name).tolist()) for name in names}) > 1


def test_missing_tensors_are_listed_before_anything_is_merged(family, names, path, mergekit_yaml):
    make_file([n for n in names if "norm" not in n], family[1:]).save(path)
    unknown = r"model\.layers\.0\.input_layernorm\.weight.*model\.norm\.weight.*`missing: mean`"
    with pytest.raises(ConfigError, match=f"(?s)no coefficients for .*{unknown}"):
        mergekit_yaml(config(family, {"coefficients": str(path)}))
    merged = mergekit_yaml(config(family, {"coefficients": str(path), "missing": "mean"}))
    mean = sum(tensors(p)["model.norm.weight"] for p in family[1:]) / 3
    torch.testing.assert_close(tensors(merged)["model.norm.weight"], mean)


FILE, WEIGHT = {"coefficients": "FILE"}, [{"weight": 1}]
TASKS = [{"task": "maths"}, {"task": "maths"}, {"task": "law"}]


@pytest.mark.parametrize(
    ("parameters", "experts", "message"),
    [
        ({}, [], "no coefficients; give exactly one"),
        ({}, WEIGHT, "no weight for"),
        (FILE, WEIGHT, "coefficients and weight; give exactly one"),
        ({}, [{"weight": "heavy"}], "parameter 'weight' is 'heavy'; allowed: a finite number"),
        (FILE, [], r"holds nothing of .*expert1\. It holds maths \(.*expert0\), law \(org/law\)"),
        (FILE, TASKS, "two experts have the same row"),
    ],
)
def test_wrong_configs_are_explained(
    family, names, path, mergekit_yaml, parameters, experts, message
):
    make_file(names, [family[1], "org/law"], tasks=["maths", "law"]).save(path)
    parameters = {k: str(path) if v == "FILE" else v for k, v in parameters.items()}
    with pytest.raises(Exception, match="(?s)statsmerging: .*" + message):
        mergekit_yaml(config(family, parameters, experts))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"learner": LearnerConfig(input="direct")}, "input: direct and granularity: tensor"),
        ({"granularity": "block"}, "granularity: block"),
    ],
)
def test_learners_that_predict_nothing(family, names, path, mergekit_yaml, contents, message):
    make_file(names, family[1:], **contents).save(path)
    with pytest.raises(ConfigError, match=message):
        mergekit_yaml(config(family, {"learner": str(path)}))
    said = command("check", path.with_name("merged.yml"), fails=True)
    assert "error: statsmerging: the learner" in said
