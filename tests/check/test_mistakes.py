# SPDX-License-Identifier: Apache-2.0
"""A catalogue of configs with a slip: `check` tells each before the merge, by place and remedy."""

from __future__ import annotations

import pytest
import yaml
from catalogue import NOTHING, findings

PLAIN = """
merge_method: ace
base_model: ./base
models: [{model: ./expert0}, {model: ./expert1}]
dtype: float32
"""


def changed(text: str) -> dict:
    """Return the plain merge with other settings at its top; `~` removes one.

    `first` are settings of the first model, `each` are parameters of all, `more` further models.
    """
    given, config = yaml.safe_load(text), yaml.safe_load(PLAIN)
    config["models"] += given.pop("more", [])
    config["models"][0] |= given.pop("first", {})
    parameters = given.pop("each", None)
    for model in config["models"] if parameters else ():
        model["parameters"] = dict(parameters)
    return {key: value for key, value in (config | given).items() if value is not None}


def slices(expert0: str = "layer_range: [0, 2]", every: str = "layer_range: [0, 2]") -> str:
    """The same merge, written in slices."""
    models = (("./base", every), ("./expert0", expert0), ("./expert1", every))
    sources = ", ".join(f"{{model: {model}, {settings}}}" for model, settings in models)
    return f"models: ~\nslices: [{{sources: [{sources}]}}]"


def modules(name: str, more: str = "") -> str:
    return f"models: ~\nmodules: {{{name}: {{models: [model: ./expert0, model: ./expert1]{more}}}}}"


NEVER = "is never reached: entries before it match its tensors"
TIES = "{merge_method: ties, parameters: "
NOWHERE = "[{filter: atn, value: 0.5}, {value: 1}]"
ERRORS = [
    # Keys that nobody reads.
    ("parameters: {epsilom: 1}", "did you mean 'epsilon'?"),
    ("each: {wieght: 1}", "models.0.parameters: there is no parameter 'wieght' of ace"),
    ("parameters: {dtype: float32}", "write it at the top level of the config"),
    ("epsilon: 0.1", "write it under `parameters:`, one level deeper"),
    ("first: {weight: 1}", "models.0: there is no setting 'weight'"),
    ("first: {epsilon: 1}", "under the `parameters:` at the top level"),
    ("each: {epsilon: 1}", "move it to the parameters: at the"),
    ("parametes: {epsilon: 1}", "did you mean 'parameters'?"),
    ("tokenizer: {sources: base}", "did you mean 'source'?"),
    ("tokenizer: {tokens: {a: {forced: true}}}", "tokens.a: there is no setting 'forced'"),
    ("parameters: {epsilon: [{fliter: mlp, value: 1}]}", "did you mean 'filter'?"),
    ("models: ~\nslices: [{sources: [], parametres: {}}]", "slices.0: there is no"),
    # Names of models.
    ("first: {model: org/unknown}", "org/unknown is no folder in "),
    ("first: {model: a/b/c}", "there is no folder a/b/c in "),
    ("first: {model: ~/none}", "~ is not expanded"),
    ("merge_method: regmean", "there are no statistics; run"),
    ("more: [model: ./none]", "there is no folder none; correct"),
    # Filters that reach nothing.
    ("parameters: {epsilon: [{filter: mpl, value: 1}, {value: 1}]}", "'mpl' matches no tensor"),
    ("parameters: {epsilon: [{value: 1}, {filter: mlp, value: 1}]}", f"the filter 'mlp' {NEVER}"),
    ("parameters: {epsilon: [{value: 1}, {value: 1}]}", f"the second entry without filter {NEVER}"),
    (f"each: {{weight: {NOWHERE}}}", "0.parameters.weight.0: the filter 'atn' matches no"),
    (f"{TIES}{{weight: 1, density: {NOWHERE}}}}}", "parameters.density.0: the filter 'atn' match"),
    # Values.
    ("parameters: {epsilon: []}", "the list is empty, and mergekit takes the default"),
    ("parameters: {epsilon: }", "parameters.epsilon: a parameter is a value, a list of"),
    ("parameters: {epsilon: small}", "'epsilon' is 'small'; allowed: a number, 0 or"),
    ("parameters: {epsilon: 1.0e+300}", "allowed: a number, 0 or greater, and at most 1e30"),
    ("{merge_method: lines, parameters: {layers: 1}}", "set `layers` to the number of all"),
    ("{merge_method: consensus_ta, parameters: {consensus: 5}}", "has 2 experts, so that nothing"),
    ("merge_method: statsmerging", "give exactly one of `coefficients: PATH`"),
    ("{merge_method: statsmerging, first: {parameters: {weight: 1}}}", "no weight for expert1"),
    ("parameters: {report: /nowhere/r.jsonl}", "there is no folder /nowhere"),
    ("parameters: {coefficients: no.safetensors}", "no coefficient file"),
    ("dtype: int64", "dtype: 'int64' is no dtype that a merged model can"),
    ("out_dtype: torch.float32", "write one of bfloat16, float16, float32"),
    ("dtype: [float32]", "dtype: Input should be a valid string"),
    ("chat_template: chatlm", "write auto, a name that mergekit knows"),
    ("chat_template: \"{% for m in x %}{{ m['content'] }\"", "nor one in Jinja"),
    ("tokenizer: base", "write `tokenizer: {source: base}`"),
    ("tokenizer: {source: base}", "base has no tokenizer"),
    ("tokenizer: {source: ./nowhere}", "nowhere has no tokenizer"),
    ("each: {weight: 0}", "the weights of all experts are 0 in every tensor"),
    ("{merge_method: linear, each: {weight: 0.5}}", "among its models; leave base_model out"),
    (f"{TIES}{{weight: 1, density: 50}}}}", "write 0.5, if it is a percentage"),
    (f"{TIES}{{weight: abc}}}}", "ties takes no parameter of 'abc': Input should be a"),
    # The method and the models.
    ("merge_method: acee", "there is no method 'acee' → did you mean 'ace'?"),
    ("merge_method: ACE-Merging", "did you mean 'ace'?"),
    ("merge_method: xyzzy", "there are: ace, ace_plus,"),
    ("{merge_method: ~, merge_methods: ace}", "there is no `merge_method:`"),
    ("base_model: ~", "Add to the config a line\n    base_model:"),
    ("models: [model: ./base]", "no expert besides the base"),
    ("more: [model: ./expert0/.]", "listed 2 times: expert0, expert0/."),
    ("models: []", "Exactly one of 'models', 'slices', or 'modules'"),
    ("{models: ~, modles: [model: ./expert0]}", "'modules' or 'models'?"),
    ("models: {model: ./expert0}", "write a list of lines `- mod"),
    ("models: ~\nslices: [sources: [{model: ./expert0, layer_range: [0, 2]}]]", "among the source"),
    (slices(*["layer_range: [0, 3]"] * 2), "lacks 9 of"),
    (slices("layer_range: [0, 1]"), "the same number of layers"),
    (slices(*["layer_range: [1, 1]"] * 2), "holds no layer"),
    (modules("text"), "the architecture has no part 'text'"),
    ("parameters: [epsilon: 1]", "write lines `name: value` below it"),
]
# YAML takes the last of two keys.
TEXTS = [
    (f"{PLAIN}parameters:\n  epsilon: 1\n  epsilon: 2\n", "in line 6 and again in line 7"),
    ("merge_method: ace\n\tbase_model: ./base\n", "cannot be read as YAML"),
    (f"{PLAIN}---{PLAIN}", "is a file of several merge configs"),
]
ONE = "model: ./base, layer_range: [0, 1]}, {model: ./expert0, layer_range: [0, 1]"
MORE = f"sources: [{{{ONE}}}], sources: [{{{ONE}}}, {{model: ./expert1, layer_range: [0, 1]}}]"
WARNINGS = [
    (f"models: ~\nslices: [{MORE}]", "merged from the last slice's first 2 models → list all its"),
    ("each: {task: x}", "`task` names an expert in a file of learned"),
    ("parameters: {lambda: 0}", "lambda: 0 leaves tensors as the base has them"),
    ("parameters: {lambda: [{filter: mlp, value: 0}, {value: 1}]}", "them: model.layers.*.mlp."),
    ("more: [{model: ./base, parameters: {weight: 1}}]", "models.2.parameters: weight is a param"),
    ("more: [model: ./base/]", "is the base model base in another spelling"),
    ("parameters: {weight: [0.3, 0.7]}", "as many values as there are experts (2)"),
]
RIGHT = [
    "out_dtype: bfloat16",
    "parameters: {epsilon: [{filter: mlp.up, value: 1}, {filter: mlp, value: 1}, {value: 1}]}",
    "parameters: {epsilon: [{filter: mlp, value: 1}, {filter: '*', value: 1}]}",
    "parameters: {spectral_refinement: always, adaptive_normalization: always}",
    "each: {weight: [{filter: mlp, value: 0}, {value: 0.5}]}",
    "first: {parameters: {weight: 0}}",
    "more: [model: ./base]",
    modules("default", ", parameters: {epsilon: [{filter: mlp, value: 1}]}"),
    slices("layer_range: [0, 2], parameters: {weight: 2}"),
    "{merge_method: ties, parameters: {weight: 0.5, density: 0.5}}",
    "merge_method: slerp\nmodels: [model: ./base, model: ./expert0]\nparameters: {t: [0, 1]}",
    "{merge_method: passthrough, base_model: ~, models: [model: ./base]}",
]


@pytest.fixture(autouse=True)
def _in_the_family(family, monkeypatch):
    monkeypatch.chdir(family)


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [(text, "error", message) for text, message in ERRORS]
    + [(text, "warning", message) for text, message in WARNINGS],
)
def test_mistakes_in_configs(text, level, message):
    told = findings(changed(text))
    assert message in told[level]
    assert level == "error" or not told["error"]


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_mistakes_in_yaml(text, message):
    assert message in findings(text.lstrip())["error"]


@pytest.mark.parametrize("config", [*map(changed, RIGHT), f"{PLAIN}parameters:\n"])
def test_configs_that_are_right(config):
    assert findings(config) == NOTHING


def test_every_place_of_a_wrong_type_is_told_once():
    told = findings(changed("{models: [{name: x}], parameters: {epsilon: }, dtype: [1]}"))["error"]
    assert told.count(" (found: ") == 3
    assert "models.0: there is no `model:` (found: {'name': 'x'})" in told
    assert findings(changed("merge_method: acee"))["error"].count("error: ") == 1
