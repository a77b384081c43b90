# SPDX-License-Identifier: Apache-2.0
"""Compare ways to merge the routers of small mixtures of experts that are trained here.

    python examples/quickstart/routers.py

Base and experts learn the languages of the quickstart. Each merge takes all other tensors by its
method, and the routers by that method, by the mean of their task vectors, or from the base.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from dictionaries import NEW_LANGUAGES, OLD_LANGUAGES, encode, exam, make_tokenizer
from family import BASE, EXPERTS, Recipe, start_model, train_family
from mergekit.options import MergeOptions
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mergekit_ace.merging.run import run_shards

ROUTER = "mlp.gate.weight"
ROUTERS = {  # parameters of the merge
    "method": {},
    "mean": {"layout": [{"filter": ROUTER, "value": "mean"}, {"value": "auto"}]},
    "base": {"lambda": [{"filter": ROUTER, "value": 0}, {"value": 1}]},
}


def start_mixture(base: Path, recipe: Recipe) -> PreTrainedModel:
    """Return a model of about a million parameters: two of eight experts read a token."""
    if recipe.new:
        return start_model(base, recipe)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **balance, **tokens))


@torch.no_grad()
def mean_loss(folder: Path, languages: tuple[str, ...]) -> float:
    """Return the mean loss of a model's answers in some languages, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, output_router_logits=False).eval()
    lines = [line for name in languages for line in exam(name)]
    ids, labels = encode(lines, make_tokenizer())
    return model(input_ids=ids, labels=labels).loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "family-mixture")
    parser.add_argument("--methods", nargs="+", default=["ace", "ace_plus", "tsv_m"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of trainings")
    parser.add_argument("--steps", type=int, help="train a model by at most so many steps")
    options = parser.parse_args()
    losses: dict[tuple[str, str], list[torch.Tensor]] = {}
    for seed in options.seeds:
        folder = options.folder.resolve() / f"seed{seed}"
        base, *experts = (
            replace(recipe, seed=recipe.seed + 10 * seed) for recipe in (BASE, *EXPERTS.values())
        )
        named = dict(zip(EXPERTS, experts, strict=True))
        train_family(folder, named, start_mixture, base, options.steps)
        for method in options.methods:
            for routers, parameters in ROUTERS.items():
                out, path = folder / f"{method}-{routers}", folder / "merge.yml"
                config = {"merge_method": method, "base_model": str(folder / "base")}
                config["models"] = [{"model": str(folder / name)} for name in NEW_LANGUAGES]
                config |= {"parameters": parameters, "dtype": "float32"}
                path.write_text(yaml.safe_dump(config), encoding="utf-8")
                run_shards(path, str(out), MergeOptions(quiet=True), overwrite=True)
                found = [mean_loss(out, names) for names in (NEW_LANGUAGES, OLD_LANGUAGES)]
                losses.setdefault((method, routers), []).append(torch.tensor(found))
    print("| method | routers by | loss in new languages | in old languages |\n|---|---|---|---|")
    for (method, routers), found in losses.items():
        new, old = torch.stack(found).mean(0).tolist()
        print(f"| `{method}` | {routers} | {new:.3f} | {old:.3f} |")


if __name__ == "__main__":
    main()
