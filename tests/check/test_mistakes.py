# SPDX-License-Identifier: Apache-2.0
"""A catalogue of configs with a slip: `check` tells each before the merge, by place and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from catalogue import findings
from checkpoints import ace_config, save_family, tiny_llama

from mergekit_ace.planning import ConfigError, read_merge_config

Config = dict | str
Change = Callable[[dict], Config]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_family(tiny_llama(), folder)
    return folder


def default(folder: Path) -> dict:
    return ace_config([str(folder / name) for name in ("base", "expert0", "expert1")])


def parameters(**given) -> Change:
    return lambda config: {**config, "parameters": given}


def top(**given) -> Change:
    return lambda config: {**config, **given}


def without(*keys: str, **given) -> Change:
    return lambda config: {k: v for k, v in config.items() if k not in keys} | given


def first(**given) -> Change:
    """Of the first expert's entry."""

    def change(config: dict) -> dict:
        config["models"][0] |= given
        return config

    return change


def each(**given) -> Change:
    """Of the parameters of all experts."""

    def change(config: dict) -> dict:
        for model in config["models"]:
            model["parameters"] = dict(given)
        return config

    return change


def listing(edit: Callable[[list, dict], object]) -> Change:
    """Of the list of experts."""

    def change(config: dict) -> dict:
        edit(config["models"], config)
        return config

    return change


def method(name: str, **given) -> Change:
    return lambda config: {**config, "merge_method": name, "parameters": given}


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
    return lambda config: {
        **{key: value for key, value in config.items() if key != "models"},
        "modules": {name: {"models": config["models"], **given}},
    }


def source(text: str) -> Change:
    """Of a config as text; the models' places are filled in."""

    def change(config: dict) -> str:
        names = {f"e{n}": entry["model"] for n, entry in enumerate(config["models"])}
        return text.format(base=config["base_model"], **names)

    return change


PLAIN = "merge_method: ace\nbase_model: {base}\nmodels:\n- model: {e0}\n- model: {e1}\n"
NEVER = "is never reached: the entries before it match all of its tensors"
ON_MLP = {"filter": "mlp", "value": 1e-3}
REST = {"value": 1e-5}

ERRORS: list[tuple[str, Change, str]] = [
    # Keys that nobody reads.
    ("a parameter with a slip", parameters(epsilom=1), "did you mean 'epsilon'?"),
    ("a hyphen", parameters(**{"epsilon-scale": "absolute"}), "did you mean 'epsilon_scale'?"),
    ("American spelling", parameters(centered=True), "did you mean 'centred'?"),
    ("a Greek letter", parameters(λ=1), "no parameter 'λ' of ace"),
    (
        "normalize",
        parameters(normalize=True),
        "'normalize' of ace; mergekit would ignore it without",
    ),
    ("gamma of breadcrumbs", first(parameters={"gamma": 0.1}), "models.0.parameters: there is no"),
    ("weight with a slip", first(parameters={"wieght": 1}), "did you mean 'weight'?"),
    ("dtype in parameters", parameters(dtype="float32"), "write it at the top level of the config"),
    ("epsilon at the top", top(epsilon=1e-3), "write it under `parameters:`, one level deeper"),
    ("weight beside model", first(weight=1), "models.0: there is no setting 'weight'"),
    ("epsilon beside model", first(epsilon=1), "under the `parameters:` at the top level"),
    ("dtype beside model", first(dtype="float32"), "write it at the top level of the config"),
    ("epsilon of an expert", first(parameters={"epsilon": 1}), "move it to the parameters: at the"),
    ("parameters with a slip", top(parametes={"epsilon": 1}), "did you mean 'parameters'?"),
    ("Tokenizer", top(Tokenizer={"source": "base"}), "did you mean 'tokenizer'?"),
    ("base_mode", without("base_model", base_mode="x"), "did you mean 'base_model'?"),
    ("sources of a tokenizer", top(tokenizer={"sources": "base"}), "did you mean 'source'?"),
    ("pad", top(tokenizer={"pad_to_multiple": 8}), "did you mean 'pad_to_multiple_of'?"),
    (
        "a token's setting",
        top(tokenizer={"tokens": {"a": {"source": {"kind": "zero"}, "forced": True}}}),
        "tokenizer.tokens.a: there is no setting 'forced'",
    ),
    (
        "a token's source",
        top(tokenizer={"tokens": {"a": {"source": {"kind": "zero", "modle": "x"}}}}),
        "tokenizer.tokens.a.source: there is no setting 'modle'",
    ),
    (
        "a key of a model",
        first(model={"model": "base", "overide_architecture": "X"}),
        "did you mean 'override_architecture'?",
    ),
    (
        "a key beside filter",
        parameters(epsilon=[{**ON_MLP, "weight": 2}]),
        "epsilon.0: there is no",
    ),
    ("fliter", parameters(epsilon=[{"fliter": "mlp", "value": 1}]), "did you mean 'filter'?"),
    ("a key of a module", modules("default", parameters={"epsilom": 1}), "modules.default.param"),
    ("a key of a slice", slices(lambda p, s: p.update(parametres={})), "slices.0: there is no"),
    ("a key of a source", slices(lambda p, s: s[1].update(wight=1)), "slices.0.sources.1: there"),
    ("weight beside a source", slices(lambda p, s: s[1].update(weight=1)), "one level deeper"),
    # Keys that stand twice: YAML takes the last.
    (
        "dtype twice",
        source(PLAIN + "dtype: float32\ndtype: bfloat16\n"),
        "line 6 and again in line",
    ),
    (
        "a parameter twice",
        source(PLAIN + "parameters:\n  epsilon: 0.1\n  lambda: 1\n  epsilon: 0.2\n"),
        "the key 'epsilon' stands in line 7 and again in line 9",
    ),
    (
        "a model twice in an entry",
        source("merge_method: ace\nbase_model: {base}\nmodels:\n- model: {e0}\n  model: {e1}\n"),
        "the key 'model' stands in line 4 and again in line 5",
    ),
    # Names of models.
    ("a name with spaces", first(model="no such model"), "no model of the Hub that can be read"),
    # Filters that reach nothing.
    (
        "a filter with a slip",
        parameters(epsilon=[{"filter": "mpl", "value": 1}, REST]),
        "'mpl' mat",
    ),
    (
        "a lone filter",
        parameters(epsilon={"filter": "xyz", "value": 1}),
        "a part of tensor names, in the same case and without wildcards",
    ),
    ("behind the default", parameters(epsilon=[REST, ON_MLP]), f"the filter 'mlp' {NEVER}"),
    ("two defaults", parameters(epsilon=[REST, REST]), f"the second entry without filter {NEVER}"),
    (
        "behind a wider one",
        parameters(epsilon=[ON_MLP, {"filter": "mlp.up", "value": 1}, REST]),
        f"the filter 'mlp.up' {NEVER}",
    ),
    (
        "a filter of an expert",
        first(parameters={"weight": [{"filter": "atn", "value": 0.5}, {"value": 1}]}),
        "models.0.parameters.weight.0: the filter 'atn' matches no tensor",
    ),
    (
        "a filter of a slice",
        slices(lambda p, s: p.update(parameters={"epsilon": [{"filter": "atn", "value": 1}]})),
        "slices.0.parameters.epsilon.0: the filter 'atn' matches no tensor",
    ),
    (
        "a filter of a method of mergekit's",
        method("ties", weight=1, density=[{"filter": "atn", "value": 1}, {"value": 0.5}]),
        "parameters.density.0: the filter 'atn' matches no tensor",
    ),
    # Values.
    ("an empty list", parameters(epsilon=[]), "the list is empty, and mergekit takes the default"),
    ("an empty list of an expert", first(parameters={"weight": []}), "weight: the list is empty"),
    ("an empty value", parameters(epsilon=[{"filter": "mlp", "value": []}]), "list is empty"),
    ("no value", parameters(epsilon=None), "parameters.epsilon: a parameter is a value, a list of"),
    ("a mapping", parameters(epsilon={"value": {"x": 1}}), "parameters.epsilon: a parameter is a"),
    ("a mixed list", parameters(epsilon=[ON_MLP, 1e-5]), "parameters.epsilon: a parameter is a"),
    ("vale", parameters(epsilon=[{"filter": "mlp", "vale": 1}]), "did you mean 'value'?"),
    ("text", parameters(epsilon="small"), "'epsilon' is 'small'; allowed: a number, 0 or"),
    ("a decimal comma", parameters(epsilon="0,5"), "'epsilon' is '0,5'; allowed"),
    ("yes", parameters(epsilon=True), "expected a number, not a boolean"),
    ("not a number", parameters(epsilon=float("nan")), "'epsilon' is nan; allowed"),
    (
        "epsilon of 1e300",
        parameters(epsilon=1e300),
        "allowed: a number, 0 or greater, and at most 1e30",
    ),
    ("lambda of 1e39", parameters(**{"lambda": 1e39}), "a finite number, at most 1e15 in size"),
    ("too few layers of lines", method("lines", layers=1), "`layers` is 1: leave it out"),
    ("rate of wudi", method("wudi", learning_rate=1e39), "a number above 0, and at most 1e15"),
    ("steps of wudi", method("wudi", steps=-1), "a whole number, 0 or greater"),
    ("weight of statsmerging", method("statsmerging", weight=1e39), "at most 1e15 in size"),
    ("consensus of nobody", method("consensus_ta", consensus=0), "a whole number, 1 or greater"),
    ("consensus of five", method("consensus_ta", consensus=5), "has 2 experts, so that nothing"),
    ("consensus of half", method("consensus_ta", consensus=1.5), "'consensus' is 1.5; allowed"),
    ("a gradient of counts", method("consensus_ta", consensus=[1, 2]), "'consensus' is 1.0"),
    ("no coefficients", method("statsmerging"), "give exactly one of `coefficients: PATH`"),
    (
        "one weight of two",
        lambda c: first(parameters={"weight": 1})(top(merge_method="statsmerging")(c)),
        "has no weight for expert1, but for another expert",
    ),
    ("a percentage", parameters(rank_fraction=30), "a number from 0 to 1"),
    ("a layout", parameters(layout="matrx"), "one of auto, matrix, transposed"),
    ("no report's folder", parameters(report="/nowhere/r.jsonl"), "there is no folder /nowhere"),
    ("no coefficient file", parameters(coefficients="no.safetensors"), "no coefficient file"),
    ("weight as text", first(parameters={"weight": "high"}), "'weight' is 'high'"),
    ("weight below 0", first(parameters={"weight": -1}), "a number, 0 or greater"),
    (
        "dtype int64",
        top(dtype="int64"),
        "config: dtype: 'int64' is no dtype that a merged model can",
    ),
    ("torch.float32", top(dtype="torch.float32"), "write one of bfloat16, float16, float32"),
    ("bfloat61", top(out_dtype="bfloat61"), "out_dtype: 'bfloat61' is no dtype"),
    ("a list of dtypes", top(dtype=["float32"]), "dtype: Input should be a valid string"),
    ("chatlm", top(chat_template="chatlm"), "write auto, a name that mergekit knows"),
    (
        "a broken template",
        top(chat_template="{% for m in x %}{{ m['content'] }"),
        "nor one in Jinja",
    ),
    ("tokenizer: base", top(tokenizer="base"), "write `tokenizer: {source: base}`"),
    ("no tokenizer", top(tokenizer={"source": "base"}), "base has no tokenizer"),
    ("two tokenizers", top(tokenizer={}, tokenizer_source="base"), "both tokenizer_source and"),
    ("weights of 0", each(weight=0), "the weights of all experts are 0 in every tensor"),
    ("linear of 0", method("linear", weight=0), "the weights of all experts are 0"),
    ("a density in percent", method("ties", weight=1, density=50), "write 0.5, if it is a perc"),
    # The method and the models.
    ("acee", top(merge_method="acee"), "there is no method 'acee' → did you mean 'ace'?"),
    ("ACE-Merging", top(merge_method="ACE-Merging"), "did you mean 'ace'?"),
    ("ace-relative", top(merge_method="ace-relative"), "did you mean 'ace_relative'?"),
    ("a method of ours alone", top(merge_method="xyzzy"), "there are: ace, ace_relative"),
    ("merge_methods", without("merge_method", merge_methods="ace"), "no line `merge_method:`"),
    ("no base", without("base_model"), "Add to the config a line\n    base_model:"),
    ("two bases", lambda c: top(base_model=[c["base_model"]])(c), "base_model: Input should be"),
    (
        "the base alone",
        lambda c: top(models=[{"model": c["base_model"]}])(c),
        "there is no expert besides the base model",
    ),
    (
        "an expert twice",
        listing(lambda m, c: m.append(dict(m[0]))),
        "config: models: expert0 is listed 2 times",
    ),
    (
        "an expert in two spellings",
        listing(lambda m, c: m.append({"model": f"{m[0]['model']}/."})),
        "expert0 is listed 2 times, as expert0 and expert0/.",
    ),
    ("no models", top(models=[]), "Exactly one of 'models', 'slices', or 'modules'"),
    ("modles", lambda c: without("models", modles=c["models"])(c), "'modules' or 'models'?"),
    (
        "a mapping of models",
        lambda c: top(models=c["models"][0])(c),
        "write a list of lines `- mod",
    ),
    ("models by name", top(models=[{"name": "x"}]), "models.0: there is no `model:`"),
    ("a model as path", first(model={"path": "x"}), "models.0.model: there is no `model:`"),
    ("slices and models", lambda c: {**slices()(dict(c)), "models": c["models"]}, "Exactly one of"),
    ("a slice without base", slices(lambda p, s: s.pop(0)), "is not among the sources"),
    (
        "no sources",
        slices(lambda p, s: p.update(source=p.pop("sources"))),
        "there is no `sources:`",
    ),
    (
        "too many layers",
        slices(lambda p, s: [x.update(layer_range=[0, 3]) for x in s]),
        "lacks 9 of",
    ),
    (
        "other layers",
        slices(lambda p, s: s[1].update(layer_range=[0, 1])),
        "the same number of layers",
    ),
    ("no layers", slices(lambda p, s: [x.update(layer_range=[1, 1]) for x in s]), "holds no layer"),
    ("an unknown part", modules("text"), "the architecture has no part 'text'"),
    ("a tab", source("merge_method: ace\n\tbase_model: {base}\n"), "is not YAML"),
    ("two documents", source(PLAIN + "---\n" + PLAIN), "is a file of several merge configs"),
    ("a list", source("- merge_method: ace\n"), "it has no line `merge_method:`"),
    ("parameters as list", top(parameters=[{"epsilon": 1}]), "write lines `name: value` below it"),
]

WARNINGS: list[tuple[str, Change, str]] = [
    ("a task of no file", each(task="x"), "`task` names an expert in a file of learned"),
    ("lambda of 0", parameters(**{"lambda": 0}), "lambda: 0 leaves tensors as the base has them"),
    (
        "lambda of 0 in a part",
        parameters(**{"lambda": [{"filter": "mlp", "value": 0}, {"value": 1}]}),
        "as the base has them: model.layers.*.mlp.",
    ),
    (
        "a weight of the base",
        listing(lambda m, c: m.insert(0, {"model": c["base_model"], "parameters": {"weight": 1}})),
        "models.0.parameters: weight is a parameter of experts, and not read under the base",
    ),
    (
        "the base in another spelling",
        listing(lambda m, c: m.insert(0, {"model": f"{c['base_model']}/"})),
        "base/ is the base model base in another spelling",
    ),
    ("a list of weights", parameters(weight=[0.3, 0.7]), "as many values as there are experts (2)"),
]


@pytest.mark.parametrize(
    ("change", "level", "message"),
    [pytest.param(change, "error", text, id=name) for name, change, text in ERRORS]
    + [pytest.param(change, "warning", text, id=name) for name, change, text in WARNINGS],
)
def test_mistakes_in_configs(family, change, level, message):
    told = findings(family, change(default(family)))
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
