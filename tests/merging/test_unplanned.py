# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge --unplanned`: what mergekit would leave out gets into the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, add, save_family, tiny_llama
from reference import naive_tensor, task_vector_error
from safetensors.torch import load_file
from sharded import (
    SHARDS,
    command,
    finished,
    linear,
    refusal,
    save_tokenizer,
    tensors_of,
    write_config,
)

from mergekit_ace.merging.output import Manifest

HEAD = {
    "mtp.layers.0.proj.weight": torch.Size([24, 32]),
    "mtp.layers.1.proj.weight": torch.Size([24, 32]),
    "mtp.norm.weight": torch.Size([32]),
}


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a model, by the index where there is one."""
    index = Path(folder, "model.safetensors.index.json")
    if not index.exists():
        return load_file(Path(folder, "model.safetensors"))
    places = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(Path(folder, file)) for file in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}


@pytest.fixture
def paths(tmp_path) -> list[str]:
    """Llamas with a head that predicts several tokens, which mergekit knows nothing of."""
    paths, rng = save_family(tiny_llama(), tmp_path), torch.Generator().manual_seed(5)
    origin = {name: torch.randn(shape, generator=rng) for name, shape in HEAD.items()}
    for n, path in enumerate(paths):
        moved = {
            name: tensor + 0.1 * n * torch.randn(tensor.shape, generator=rng)
            for name, tensor in origin.items()
        }
        add(path, **moved)
    return paths


def test_by_default_it_is_an_error(tmp_path, paths):
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    text = refusal(config, tmp_path / "merged")
    assert "no merge of 3 tensors of" in text
    assert "--unplanned merge` merges them" in text
    assert not (tmp_path / "merged").exists()
    # --no-check is no consent to lose them
    assert "no merge of 3 tensors of" in refusal(config, tmp_path / "merged", "--no-check")


def test_heads_are_merged_like_everything_else(tmp_path, paths):
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    command(config, tmp_path / "merged", "--unplanned", "merge")
    base, *experts = map(weights, paths)
    merged = weights(tmp_path / "merged")
    assert merged.keys() == base.keys()
    for name, shape in HEAD.items():
        layout = "matrix" if len(shape) == 2 else "mean"
        expected = naive_tensor(base[name], [expert[name] for expert in experts], layout)
        assert task_vector_error(merged[name], expected, base[name]) <= 5e-5


@pytest.mark.parametrize("treatment", ["base", "merge"])
def test_what_was_planned_stays_as_it_was(tmp_path, paths, treatment, mergekit_yaml):
    """And dtypes are those of the config, for what is copied as for what is merged."""
    settings = ace_config(paths, out_dtype="bfloat16")
    config = write_config(tmp_path / "merge.yml", settings)
    command(config, tmp_path / "ours", "--unplanned", treatment)
    ours, theirs = weights(tmp_path / "ours"), weights(mergekit_yaml(settings))
    assert ours.keys() - theirs.keys() == HEAD.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


@pytest.mark.parametrize("treatment", ["base", "merge"])
def test_they_are_in_shards_reports_index_and_manifest(tmp_path, paths, treatment):
    report, out = tmp_path / "report.jsonl", tmp_path / "merged"
    settings = ace_config(paths, parameters={"report": str(report)})
    config = write_config(tmp_path / "merge.yml", settings)
    command(config, out, *SHARDS, "--unplanned", treatment)
    assert all((out / shard).stat().st_size < 16_000 for shard in finished(out))
    assert Manifest.read(out).identity["unplanned"] == [treatment]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"])[-3:] == list(HEAD)
    assert set(index["weight_map"]) == set(tensors_of(out)) == set(weights(paths[0]))
    lines = [json.loads(line)["tensor"] for line in report.read_text().splitlines()]
    assert len(lines) == len(set(lines))
    assert (HEAD.keys() <= set(lines)) == (treatment == "merge")
    other = {"base": "merge", "merge": "base"}[treatment]
    text = refusal(config, out, *SHARDS, "--unplanned", other)
    assert "changed since it was begun: unplanned" in text


def test_rows_of_tokens_follow_the_tokenizer(tmp_path):
    """A head has a row per token of the result, though only the embeddings are planned."""
    paths = save_family(tiny_llama(), tmp_path)
    for n, path in enumerate(paths):
        save_tokenizer(path, 38)  # two rows of the embeddings are padding
        rows = torch.arange(40.0)[:, None] + 100 * n + torch.zeros(40, 32)
        add(path, mtp__head__weight=rows)
    settings = linear(paths, tokenizer={"source": paths[0]})
    config = write_config(tmp_path / "merge.yml", settings)
    command(config, tmp_path / "copied", "--unplanned", "base")
    command(config, tmp_path / "merged", "--unplanned", "merge")
    copied, merged = weights(tmp_path / "copied"), weights(tmp_path / "merged")["mtp.head.weight"]
    assert copied["model.embed_tokens.weight"].shape[0] == 38
    assert merged.shape[0] == copied["mtp.head.weight"].shape[0] == 38
    assert torch.allclose(merged[:, 0], torch.arange(38.0) + 100)


def test_another_shape_is_an_error_before_anything_is_merged(tmp_path, paths):
    add(paths[2], mtp__norm__weight=torch.ones(31))
    config = write_config(tmp_path / "merge.yml", ace_config(paths))
    text = refusal(config, tmp_path / "merged", "--unplanned", "merge")
    assert all(part in text for part in ("mtp.norm.weight", paths[2], "31"))
    assert not (tmp_path / "merged").exists()
    command(config, tmp_path / "merged", "--unplanned", "base")
