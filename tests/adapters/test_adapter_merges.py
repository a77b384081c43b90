# SPDX-License-Identifier: Apache-2.0
"""Merges of adapters, as adapters and as full models, beside mergekit's merges of full models."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoints import save_tokenizer, tiny_llama
from coefficient_files import make_file
from commands import command, run_config
from imitated_gpu import GPU, imitated_gpu
from mergekit.common import ModelReference
from peft import PeftModel
from peft_models import (
    CASES,
    LINEAR,
    compare_changes,
    config_of,
    dense_changes,
    mixtral,
    save_adapters,
    tied_llama,
    train_by_chance,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mergekit_ace.adapters import command as adapter_command
from mergekit_ace.adapters import merge as adapter_merge
from mergekit_ace.algebra.ace import PlusOptions
from mergekit_ace.naming import FileError
from mergekit_ace.report.summary import read_records
from mergekit_ace.training.models import local_folder

SHARDS = ("--out-shard-size", "6K")
load = AutoModelForCausalLM.from_pretrained


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> tuple[str, ...]:
    """How mergekit merges adapters into the base first, which it keeps."""
    cache = ("--lora-merge-cache", str(tmp_path_factory.mktemp("cache")))
    return (*cache, "--lora-merge-dtype", "float32", "--no-copy-tokenizer")


def run(kind: str, config: dict, out: Path, *flags: object, fails: bool = False) -> str:
    own = ("--no-copy-tokenizer",) if kind == "merge" else ()
    return run_config(kind, config, out, *own, *flags, fails=fails, quiet=False)


def only_full(model: ModelReference, *_, **__) -> ModelReference:
    assert model.lora is None, f"{model} was merged into its base"
    return model


def merged(kind: str, config: dict, base: str, out: Path) -> dict[str, Tensor]:
    """The weights that a command makes, of the base with the merged adapter."""
    weights = Path(base, "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelReference, "merged", only_full)
        if kind == "merge":
            run(kind, config, out)
            return load(out).state_dict()
        hidden = weights.rename(f"{weights}.hidden")
        run(kind, config, out)
        hidden.rename(weights)
    return PeftModel.from_pretrained(load(base), out).merge_and_unload().state_dict()


@pytest.fixture
def compare(mergekit_yaml, cached, tmp_path) -> Callable[..., None]:
    """Compare the task vectors of mergekit's merge of full models with those of our commands."""

    def all_ways(config: dict, base: str, *kinds: str, theirs: dict | None = None) -> None:
        full = mergekit_yaml(theirs or config, *cached, out="theirs")
        expected, origin = load(full).state_dict(), load(base).state_dict()
        for kind in kinds or ("merge", "adapter"):
            got = merged(kind, config, base, tmp_path / kind)
            # `ace_plus` strengthens rounding of full models, as all directions that are weak
            bar = 5e-4 if config["merge_method"] == "ace_plus" else 5e-5
            compare_changes(got, expected, origin, bar)

    return all_ways


METHODS = [  # with parameters, and weights of the experts
    ("ace", {}, [1.0, 0.5, [0.1, 2.0]]),
    ("ace", {"spectral_refinement": "always", "adaptive_normalization": "always"}, []),
    ("ace", {"epsilon": 1e-2, "lambda": [{"filter": "q_proj", "value": 0.3}, {"value": 1.5}]}, []),
    ("ace", {"layout": [{"filter": "up_proj", "value": "transposed"}, {"value": "auto"}]}, []),
    ("ace", {"layout": [{"filter": "q_proj", "value": "mean"}, {"value": "auto"}]}, []),
    ("ace_plus", {}, []),
    ("lines", {}, []),
    ("cart", {"rank_fraction": 0.1}, []),
    ("wudi", {"solver": "exact"}, []),
    ("tsv_m", {}, []),
    ("iso_c", {}, []),
    ("iso_cts", {}, []),
    ("statsmerging", {}, [0.4, [-0.5, 1.0], 0.3]),
    ("task_arithmetic", {"weight": 0.6, "normalize": True, "lambda": 1.2}, []),
    ("linear", {"weight": 0.3}, []),
    ("linear", {"weight": 0.3, "normalize": False}, []),  # which scales the base
    ("ties", {"weight": 0.5, "density": 0.4}, []),
]


@pytest.mark.parametrize(("method", "parameters", "weights"), METHODS)
def test_the_same_config_gives_the_same_weights(family, compare, method, parameters, weights):
    config = config_of(family, method, **parameters)
    for model, weight in zip(config["models"], weights, strict=False):
        model["parameters"] = {"weight": weight}
    no_adapter = method == "ties" or not parameters.get("normalize", True)
    compare(config, family[0], *["merge"] * no_adapter)


@pytest.mark.parametrize(
    ("case", "method"),
    [*((case, "ace") for case in CASES), *((case, "ace_plus") for case in ("linear", "table"))],
)
def test_every_kind_is_merged_as_full_models(compare, tmp_path, case, method):
    """What adapters have by their layers, `side: auto`, has to be said of full models."""
    build, options = CASES[case]
    paths = save_adapters(tmp_path, build, *[options] * 3)
    config = config_of(paths, method)
    references = [ModelReference.model_validate(one["model"]) for one in config["models"]]
    full = [one.merged(str(tmp_path / "cache"), False, "float32") for one in references]
    theirs = {**config, "models": [{"model": one.model.path} for one in full]}
    theirs["parameters"] = {"side": "outputs"}
    kinds = ("merge",) if case == "saved" else ("merge", "adapter")
    compare(config, paths[0], *kinds, theirs=theirs)


def test_coefficients(family, compare, tmp_path):
    names, models = list(load(family[0]).state_dict()), [f"{family[0]}+{p}" for p in family[1:]]
    parameters = PlusOptions().model_dump(mode="json")
    path = str(tmp_path / "coefficients.safetensors")
    make_file(names, models, basis="ace_plus", parameters=parameters).save(path)
    compare(config_of(family, "ace_plus", coefficients=path), family[0])


def test_a_merged_adapter_merges_again_beside_the_base(family, compare, tmp_path):
    run("adapter", config_of(family[:3], "ace"), tmp_path / "first")
    config = config_of([family[0], str(tmp_path / "first"), family[3]], "linear", weight=0.3)
    config["models"].append({"model": family[0], "parameters": {"weight": 0.5}})
    compare(config, family[0])


def test_layers_elsewhere_and_full_models(family, compare, tmp_path):
    """Each adapter has its own layer there, the other way round in the result."""
    full = str(tmp_path / "full")
    tiny_llama(seed=5).save_pretrained(full)
    experts = [f"{family[0]}+{path}" for path in family[1:3]]
    slices = [
        {"sources": [{"model": m, "layer_range": [n, n + 1]} for n, m in sources]}
        for sources in (
            [(1, family[0]), *((1, expert) for expert in experts)],
            [(0, family[0]), (0, experts[1]), (0, full)],
            [(0, family[0]), (1, experts[0])],  # a change of another layer than the base's
        )
    ]
    config = {"merge_method": "ace", "base_model": family[0], "slices": slices, "dtype": "float32"}
    config["parameters"] = {"weight": 0.7}
    compare(config, family[0], "merge")


def test_configs_that_mean_the_same(tmp_path):
    """bfloat16 rounds no change away, and a base may be spelled in two ways."""
    paths = save_adapters(
        tmp_path, lambda: tiny_llama().bfloat16(), *[{"target_modules": LINEAR}] * 2
    )
    ties, ace = config_of(paths, "ties", weight=0.5, density=0.4), config_of(paths, "ace")
    narrow = {**ties, "out_dtype": "bfloat16"}
    del ties["dtype"]
    configs = (ties, narrow, ace, {**ace, "base_model": f"{paths[0]}/."})
    made = [merged("merge", c, paths[0], tmp_path / str(n)) for n, c in enumerate(configs)]
    for one, other in (made[:2], made[2:]):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_adapters_bring_a_chat_template(tmp_path):
    paths = save_adapters(tmp_path, tiny_llama, {"target_modules": ["q_proj"]})
    save_tokenizer(paths[0], "abc")
    save_tokenizer(paths[1], "abc", template="{{ 1 }}")
    config, out = config_of(paths, "ace"), tmp_path / "out"
    assert "chat_template: auto" in run_config("check", config, out, quiet=False)
    run_config("merge", {**config, "chat_template": "auto"}, out)
    assert (out / "chat_template.jinja").read_text() == "{{ 1 }}"


def test_experts_that_the_base_stores_one_by_one(tmp_path):
    """PEFT changes them as one tensor."""
    paths = save_adapters(tmp_path, *CASES["experts"])
    base = mixtral()
    base.load_state_dict(load_file(Path(paths[0], "model.safetensors")))
    base.save_pretrained(paths[0])
    said = run("merge", config_of(paths, "ace_plus"), tmp_path / "ours", fails=True)
    assert "mlp.experts.gate_up_proj" in said
    assert "merge_and_unload" in said
    told = run_config("check", config_of(paths, "ace_plus"), tmp_path / "ours", quiet=False)
    assert "by mergekit-yaml only" in told


def test_the_reports_are_those_of_the_full_merge(family, cached, mergekit_yaml, tmp_path):
    """And a merge has the dtypes that are asked for."""
    reports = {name: tmp_path / f"{name}.jsonl" for name in ("full", "adapter", "merge")}
    configs = {n: config_of(family, "ace", report=str(path)) for n, path in reports.items()}
    mergekit_yaml(configs["full"], *cached)
    run("adapter", configs["adapter"], tmp_path / "adapter")
    dtypes = {"dtype": "bfloat16", "out_dtype": "float16"}
    run("merge", configs["merge"] | dtypes, tmp_path / "merge")
    stored = load_file(tmp_path / "merge" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    full, *others = ({one.tensor: one for one in read_records(p)} for p in reports.values())
    changed = {name for name, line in full.items() if any(line.matrices[0].tau)}
    assert others[0].keys() == changed
    assert others[1].keys() == full.keys() == stored.keys()
    for line, expected in ((other[name], full[name]) for name in changed for other in others):
        for field in ("layout", "shape", "models"):
            assert getattr(line, field) == getattr(expected, field)
        (matrix,), (wanted,) = line.matrices, expected.matrices
        assert matrix.tau == pytest.approx(wanted.tau, rel=1e-4)
        for field in ("rule", "heterogeneous", "normalized"):
            assert getattr(matrix, field) == getattr(wanted, field)


def test_a_merge_that_goes_on(family, tmp_path):
    """What is finished is kept, unless an adapter was trained further."""
    paths = [family[0], str(tmp_path / "own"), family[2]]
    options = {"target_modules": LINEAR, "r": 3, "lora_alpha": 1}
    train_by_chance(tiny_llama, Path(paths[1]), 7, **options)
    config, out = config_of(paths, "ace"), tmp_path / "out"
    run("merge", config, out, *SHARDS)
    whole = {path: path.read_bytes() for path in out.glob("*.safetensors")}
    for path in sorted(whole)[1:]:
        path.unlink()
    said = run("merge", config, out, *SHARDS, "--resume", "--workers", 2)
    assert f"1 of {len(whole)} shards are finished and kept" in said
    assert {path: path.read_bytes() for path in whole} == whole
    train_by_chance(tiny_llama, Path(paths[1]), 8, **options)
    said = run("merge", config, out, *SHARDS, fails=True)
    assert "own/adapter_model.safetensors" in said


TIED = [
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["lm_head"]},
    {"target_modules": ["lm_head", "embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("options", TIED, ids=str)
def test_tied_tensors_are_merged_on_an_untied_base(tmp_path, options):
    """The remedy of the error gives what PEFT's model answers; an adapter needs no remedy."""
    paths = save_adapters(tmp_path, tied_llama, options)
    said = run("merge", config_of(paths, "ace"), tmp_path / "out", fails=True)
    assert "model.embed_tokens.weight and lm_head.weight tied, as one tensor" in said
    # mergekit-yaml and training merge by PEFT, which unties what is saved whole
    factors = "modules_to_save" not in options
    checked = command("check", tmp_path / "out.yml", fails=factors)
    assert "tied, as one tensor" in checked
    assert ("merged by mergekit-yaml only" in checked) != factors
    with pytest.raises(FileError, match="tied") if factors else nullcontext():
        local_folder(f"{paths[0]}+{paths[1]}", tmp_path, False)

    base, tokens = load(paths[0]), torch.arange(3, 15)[None]
    untied = tiny_llama(tie_word_embeddings=False)
    untied.load_state_dict(base.state_dict())
    untied.save_pretrained(tmp_path / "untied")
    run("merge", config_of([str(tmp_path / "untied"), paths[1]], "ace"), tmp_path / "out")
    answers = [load(tmp_path / "out")(tokens).logits]
    if factors:
        run("adapter", config_of(paths, "ace"), tmp_path / "adapter")
        answers.append(PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits)
    expected = PeftModel.from_pretrained(load(paths[0]), paths[1])(tokens).logits
    for logits in answers:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def tables(tmp_path) -> list[str]:
    """A base of each test's own: on an imitated GPU, it is another one in memory, and kept."""
    options = {"target_modules": ["q_proj", "up_proj", "embed_tokens"]}
    return save_adapters(tmp_path, tiny_llama, {**options, "r": 3}, {**options, "r": 2})


def written(kind: str, config: dict, out: Path, *flags: object) -> dict[str, Tensor]:
    """The tensors of a full merge; of an adapter, the products, whose factors' signs are open."""
    run(kind, config, out, *flags)
    return load_file(out / "model.safetensors") if kind == "merge" else dense_changes(out)


@pytest.mark.parametrize(("method", "weight"), [("ace", {}), ("linear", {"weight": 0.5})])
@pytest.mark.parametrize("kind", ["adapter", "merge"])
def test_devices(gpu, tmp_path, tables, kind, method, weight):
    config = config_of(tables, method, **weight)
    expected = written(kind, config, tmp_path / "cpu")
    found = written(kind, config, tmp_path / "gpu", "--device", gpu)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["adapter", "merge"])
def test_full_devices(monkeypatch, tmp_path, caplog, tables, kind):
    """There is room for what is on the GPU already, and nothing more."""
    config, merge_changes = config_of(tables, "ace"), adapter_merge.merge_changes
    expected = written(kind, config, tmp_path / "cpu")
    with imitated_gpu(monkeypatch) as device:

        def beside_others(*arguments, **named):
            device.memory = device.used
            try:
                return merge_changes(*arguments, **named)
            finally:
                device.memory = math.inf

        for module in (adapter_merge, adapter_command):
            monkeypatch.setattr(module, "merge_changes", beside_others)
        found = written(kind, config, tmp_path / "gpu", "--device", GPU)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert "does not fit into the free memory of meta; computed on the CPU" in caplog.text
