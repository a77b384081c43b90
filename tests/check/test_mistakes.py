# SPDX-License-Identifier: Apache-2.0
"""A catalogue of configs with a slip: `check` tells each before the merge, by place and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from catalogue import family_config, findings

from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import read_merge_config

Change = Callable[[dict], dict | str]


def top(**given) -> Change:
    return lambda config: config | given


def parameters(**given) -> Change:
    return top(parameters=given)


def method(name: str, **given) -> Change:
    return top(merge_method=name, parameters=given)


def without(*keys: str, **given) -> Change:
    return lambda config: {k: v for k, v in config.items() if k not in keys} | given


def listing(edit: Callable[[list, str], object]) -> Change:
    """Of the list of experts, with the base's path at hand."""

    def change(config: dict) -> dict:
        edit(config["models"], config["base_model"])
        return config

    return change


def first(**given) -> Change:
    """Of the first expert's entry."""
    return listing(lambda models, base: models[0].update(given))


def each(**given) -> Change:
    """Of the parameters of all experts."""
    return listing(lambda models, base: [m.update(parameters=dict(given)) for m in models])


def slices(edit: Callable[[dict, list], object] = lambda piece, sources: None) -> Change:
    """Of the same merge, written in slices."""

    def change(config: dict) -> dict:
        models = [config["base_model"], *(entry["model"] for entry in config.pop("models"))]
        sources = [{"model": model, "layer_range": [0, 2]} for model in models]
        config["slices"] = [{"sources": sources}]
        edit(config["slices"][0], sources)
        return config

    return change


def modules(name: str, **given) -> Change:
    return lambda config: without("models", modules={name: {"models": config["models"], **given}})(
        config
    )


def source(text: str) -> Change:
    """Of a config as text; the models' places are filled in."""
    return lambda config: text.format(
        base=config["base_model"], e0=config["models"][0]["model"], e1=config["models"][1]["model"]
    )


PLAIN = "merge_method: ace\nbase_model: {base}\nmodels:\n- model: {e0}\n- model: {e1}\n"
NEVER = "is never reached: the entries before it match all of its tensors"
ON_MLP = {"filter": "mlp", "value": 1e-3}
REST = {"value": 1e-5}
NOWHERE = [{"filter": "atn", "value": 0.5}, REST]


ERRORS: list[tuple[Change, str]] = [
    # Keys that nobody reads.
    (parameters(epsilom=1), "did you mean 'epsilon'?"),
    (first(parameters={"wieght": 1}), "models.0.parameters: there is no parameter 'wieght' of ace"),
    (parameters(dtype="float32"), "write it at the top level of the config"),
    (top(epsilon=1e-3), "write it under `parameters:`, one level deeper"),
    (first(weight=1), "models.0: there is no setting 'weight'"),
    (first(epsilon=1), "under the `parameters:` at the top level"),
    (first(parameters={"epsilon": 1}), "move it to the parameters: at the"),
    (top(parametes={"epsilon": 1}), "did you mean 'parameters'?"),
    (top(tokenizer={"sources": "base"}), "did you mean 'source'?"),
    (top(tokenizer={"tokens": {"a": {"forced": True}}}), "tokens.a: there is no setting 'forced'"),
    (parameters(epsilon=[{"fliter": "mlp", "value": 1}]), "did you mean 'filter'?"),
    (slices(lambda p, s: p.update(parametres={})), "slices.0: there is no"),
    # Keys that stand twice: YAML takes the last.
    (
        source(PLAIN + "parameters:\n  epsilon: 1\n  epsilon: 2\n"),
        "'epsilon' stands in line 7 and again in line 8",
    ),
    # Names of models.
    (first(model="org/unknown"), f"org/unknown is no folder in {Path.cwd()}, and no model of the"),
    (listing(lambda m, base: m.append({"model": f"{base}-none"})), "there is no folder base-none"),
    # Filters that reach nothing.
    (parameters(epsilon=[{"filter": "mpl", "value": 1}, REST]), "'mpl' matches no tensor"),
    (parameters(epsilon=[REST, ON_MLP]), f"the filter 'mlp' {NEVER}"),
    (parameters(epsilon=[REST, REST]), f"the second entry without filter {NEVER}"),
    (first(parameters={"weight": NOWHERE}), "0.parameters.weight.0: the filter 'atn' matches no"),
    (method("ties", weight=1, density=NOWHERE), "parameters.density.0: the filter 'atn' matches"),
    # Values.
    (parameters(epsilon=[]), "the list is empty, and mergekit takes the default"),
    (parameters(epsilon=None), "parameters.epsilon: a parameter is a value, a list of"),
    (parameters(epsilon=[ON_MLP, 1e-5]), "parameters.epsilon: a parameter is a"),
    (parameters(epsilon="small"), "'epsilon' is 'small'; allowed: a number, 0 or"),
    (parameters(epsilon=1e300), "allowed: a number, 0 or greater, and at most 1e30"),
    (method("lines", layers=1), "`layers` is 1: leave it out"),
    (method("wudi", solver="newton"), "one of adam, exact"),
    (method("consensus_ta", consensus=5), "has 2 experts, so that nothing"),
    (method("statsmerging"), "give exactly one of `coefficients: PATH`"),
    (
        lambda c: method("statsmerging")(first(parameters={"weight": 1})(c)),
        "no weight for expert1, but",
    ),
    (parameters(report="/nowhere/r.jsonl"), "there is no folder /nowhere"),
    (parameters(coefficients="no.safetensors"), "no coefficient file"),
    (first(parameters={"weight": -1}), "a number, 0 or greater"),
    (top(dtype="int64"), "dtype: 'int64' is no dtype that a merged model can"),
    (top(out_dtype="torch.float32"), "write one of bfloat16, float16, float32"),
    (top(dtype=["float32"]), "dtype: Input should be a valid string"),
    (top(chat_template="chatlm"), "write auto, a name that mergekit knows"),
    (top(chat_template="{% for m in x %}{{ m['content'] }"), "nor one in Jinja"),
    (top(tokenizer="base"), "write `tokenizer: {source: base}`"),
    (top(tokenizer={"source": "base"}), "base has no tokenizer"),
    (each(weight=0), "the weights of all experts are 0 in every tensor"),
    (
        lambda config: each(weight=0.5)(top(merge_method="linear")(config)),
        "counts the base model among its models; leave base_model out",
    ),
    (method("ties", weight=1, density=50), "write 0.5, if it is a perc"),
    # The method and the models.
    (top(merge_method="acee"), "there is no method 'acee' → did you mean 'ace'?"),
    (top(merge_method="ACE-Merging"), "did you mean 'ace'?"),
    (top(merge_method="xyzzy"), "there are: ace, ace_plus, ace_relative"),
    (without("merge_method", merge_methods="ace"), "no line `merge_method:`"),
    (without("base_model"), "Add to the config a line\n    base_model:"),
    (
        listing(lambda m, base: m.__setitem__(slice(None), [{"model": base}])),
        "no expert besides the base",
    ),
    (
        listing(lambda m, base: m.append({"model": m[0]["model"] + "/."})),
        "listed 2 times: expert0, expert0/.",
    ),
    (top(models=[]), "Exactly one of 'models', 'slices', or 'modules'"),
    (lambda c: without("models", modles=c["models"])(c), "'modules' or 'models'?"),
    (lambda c: top(models=c["models"][0])(c), "write a list of lines `- mod"),
    (slices(lambda p, s: s.pop(0)), "is not among the sources"),
    (slices(lambda p, s: [x.update(layer_range=[0, 3]) for x in s]), "lacks 9 of"),
    (slices(lambda p, s: s[1].update(layer_range=[0, 1])), "the same number of layers"),
    (slices(lambda p, s: [x.update(layer_range=[1, 1]) for x in s]), "holds no layer"),
    (modules("text"), "the architecture has no part 'text'"),
    (source("merge_method: ace\n\tbase_model: {base}\n"), "is not YAML"),
    (source(PLAIN + "---\n" + PLAIN), "is a file of several merge configs"),
    (top(parameters=[{"epsilon": 1}]), "write lines `name: value` below it"),
]

WARNINGS: list[tuple[Change, str]] = [
    (each(task="x"), "`task` names an expert in a file of learned"),
    (parameters(**{"lambda": 0}), "lambda: 0 leaves tensors as the base has them"),
    (
        parameters(**{"lambda": [{"filter": "mlp", "value": 0}, REST]}),
        "base has them: model.layers.*.mlp.",
    ),
    (
        listing(lambda m, base: m.append({"model": base, "parameters": {"weight": 1}})),
        "models.2.parameters: weight is a parameter of experts, and not read under the base",
    ),
    (
        listing(lambda m, base: m.append({"model": f"{base}/"})),
        "is the base model base in another spelling",
    ),
    (parameters(weight=[0.3, 0.7]), "as many values as there are experts (2)"),
]


@pytest.mark.parametrize(
    ("change", "level", "message"),
    [(change, "error", text) for change, text in ERRORS]
    + [(change, "warning", text) for change, text in WARNINGS],
)
def test_mistakes_in_configs(family, change, level, message):
    told = findings(family, change(family_config(family)))
    assert message in told[level]
    assert level == "error" or not told["error"]


def test_every_place_of_a_wrong_type_is_told_once(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("merge_method: ace\nmodels: [{name: x}]\nparameters: {epsilon: }\ndtype: [1]\n")
    with pytest.raises(ConfigError) as caught:
        read_merge_config(path)
    text = str(caught.value)
    assert text.count(" (found: ") == 3
    assert "models.0: there is no `model:` (found: {'name': 'x'})" in text
    assert "parameters.epsilon: a parameter is a value" in text
    assert "dtype: Input should be a valid string (found: [1])" in text
