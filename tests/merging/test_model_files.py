# SPDX-License-Identifier: Apache-2.0
"""What is beside the weights of a model gets into the result, whatever `tokenizer:` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import ace_config
from mergekit.config import MergeConfiguration
from sharded import command, linear, save_speakers, write_config

from mergekit_ace.files.model_files import add_model_files, lost_model_files

GENERATION = {"eos_token_id": [7, 9], "do_sample": False}
FILES = {
    "generation_config.json": json.dumps(GENERATION),
    "preprocessor_config.json": '{"image_processor_type": "ViTImageProcessor"}',
    "processor_config.json": '{"processor_class": "LlavaProcessor"}',
    "video_preprocessor_config.json": '{"size": 3}',
}
SETTINGS = {
    "none": {},
    "base": {"tokenizer": {"source": "base"}},
    "union": {"tokenizer": {"source": "union"}},
    "padded": {"tokenizer": {"source": "base", "pad_to_multiple_of": 8}},
    "legacy": {"tokenizer_source": "base"},
    "template": {"chat_template": "chatml"},
    "both": {"tokenizer": {"source": "base"}, "chat_template": "chatml"},
}


@pytest.fixture
def paths(tmp_path) -> list[str]:
    paths = save_speakers(tmp_path)
    for name, text in FILES.items():
        Path(paths[0], name).write_text(text)
    return paths


def config_of(paths: list[str], setting: str) -> dict:
    """A config; without aligned tokens, of the base alone: the experts have more of them."""
    if SETTINGS[setting].keys() <= {"chat_template"}:
        return linear(paths[:1], **SETTINGS[setting])
    return ace_config(paths, **SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_they_survive_every_setting(tmp_path, paths, setting):
    config = write_config(tmp_path / "merge.yml", config_of(paths, setting))
    command(config, tmp_path / "merged", "--no-check", "--quiet")
    for name, text in FILES.items():
        assert (tmp_path / "merged" / name).read_text() == text, name
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_lost_is_known_before(tmp_path, paths, mergekit_yaml, setting):
    """`mergekit-yaml` leaves out exactly what is foretold, and it is added afterwards."""
    config = config_of(paths, setting)
    parsed = MergeConfiguration.model_validate(config)
    out = mergekit_yaml(config)
    lost = {name for name in FILES if not (out / name).exists()}
    assert lost_model_files(parsed, ()).keys() == lost
    assert "processor_config.json" in lost
    assert ("generation_config.json" in lost) == (setting != "none")
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert add_model_files(parsed, out).keys() == lost
    assert {path: path.read_bytes() for path in before} == before
    assert not add_model_files(parsed, out)


def test_end_tokens_go_with_the_tokenizer(paths, tmp_path):
    """Tokens are named by their numbers, which are those of the model that the tokenizer is of."""
    Path(paths[1], "generation_config.json").write_text('{"eos_token_id": 41}')
    config = MergeConfiguration.model_validate(ace_config(paths, tokenizer={"source": paths[1]}))
    out = tmp_path / "out"
    out.mkdir()
    added = add_model_files(config, out)
    assert str(added["generation_config.json"]) == paths[1]
    assert str(added["processor_config.json"]) == paths[0]
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 41}


def test_what_transformers_derives_is_no_loss(paths, tmp_path):
    derived = json.dumps({"_from_model_config": True, "eos_token_id": 2})
    Path(paths[0], "generation_config.json").write_text(derived)
    config = MergeConfiguration.model_validate(ace_config(paths, tokenizer={"source": "base"}))
    assert "generation_config.json" not in lost_model_files(config, ())
    out = tmp_path / "out"
    out.mkdir()
    assert "generation_config.json" not in add_model_files(config, out)
    changed = json.dumps({"_from_model_config": True, "eos_token_id": [2, 5]})
    Path(paths[0], "generation_config.json").write_text(changed)
    assert "generation_config.json" in add_model_files(config, out)


@pytest.mark.parametrize(
    "has", ["chat_template.jinja", "in the config", "configured", "no tokenizer"]
)
def test_templates_are_not_doubled(paths, tmp_path, has):
    """A result that has a chat template, or none by intent, gets no other."""
    base, out = Path(paths[0]), tmp_path / "out"
    out.mkdir()
    (base / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    own = {"chat_template": "{{ own }}"} if has == "in the config" else {}
    if has != "no tokenizer":
        (out / "tokenizer_config.json").write_text(json.dumps(own))
    if has == "chat_template.jinja":
        (out / has).write_text("{{ own }}")
    configured = {"chat_template": "chatml"} if has == "configured" else {}
    config = MergeConfiguration.model_validate(ace_config(paths, **configured))
    assert not [name for name in add_model_files(config, out) if "template" in name]


def test_templates_that_are_missing_are_added(paths, tmp_path):
    base, out = Path(paths[0]), tmp_path / "out"
    out.mkdir()
    (out / "tokenizer_config.json").write_text("{}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    config = MergeConfiguration.model_validate(ace_config(paths))
    added = add_model_files(config, out)
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja"} <= added.keys()
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


def test_relative_names_are_found_beside_the_result(paths, tmp_path):
    names = [Path(path).name for path in paths]
    config = MergeConfiguration.model_validate(ace_config(names))
    out = tmp_path / "merged"
    out.mkdir()
    assert not add_model_files(config, out)
    assert add_model_files(config, out, beside=tmp_path).keys() >= FILES.keys()
