# SPDX-License-Identifier: Apache-2.0
"""What is beside the weights of a model gets into the result, whatever `tokenizer:` says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoints import ace_config
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError
from mergekit.common import ModelPath
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from sharded import linear

from mergekit_ace.files.checkpoints import add_model_files, find_model_file, lost_model_files
from mergekit_ace.naming import FileError

FILES = {
    "generation_config.json": '{"eos_token_id": [7, 9], "do_sample": false}',
    "preprocessor_config.json": '{"image_processor_type": "ViTImageProcessor"}',
    "processor_config.json": '{"processor_class": "LlavaProcessor"}',
    "video_preprocessor_config.json": '{"size": 3}',
}


@pytest.fixture
def paths(tmp_path, speakers) -> list[str]:
    (tmp_path / "out").mkdir()
    paths = [shutil.copytree(path, tmp_path / Path(path).name) for path in speakers]
    for name, text in FILES.items():
        Path(paths[0], name).write_text(text)
    return [str(path) for path in paths]


def parse(config: dict) -> MergeConfiguration:
    return MergeConfiguration.model_validate(config)


@pytest.mark.parametrize(
    "settings", [{}, {"tokenizer_source": "base"}, {"chat_template": "chatml"}], ids=str
)
def test_what_is_lost_is_known_before_and_added(tmp_path, paths, merge, mergekit_yaml, settings):
    """`mergekit-yaml` leaves out exactly what is foretold; a merge of ours leaves out nothing."""
    config = linear(paths[:1], **settings)  # alone: the experts have more tokens
    if "tokenizer_source" in settings:
        config = ace_config(paths, **settings)
    merge(config, "--no-check", "--quiet", out="ours")
    assert {name: (tmp_path / "ours" / name).read_text() for name in FILES} == FILES
    assert (tmp_path / "ours" / "chat_template.jinja").is_file()
    out = mergekit_yaml(config)
    lost = {name for name in FILES if not (out / name).exists()}
    assert lost_model_files(parse(config), ()).keys() == lost
    assert "processor_config.json" in lost
    assert ("generation_config.json" in lost) == bool(settings)
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert add_model_files(parse(config), out).keys() == lost
    assert {path: path.read_bytes() for path in before} == before
    assert not add_model_files(parse(config), out)


@pytest.mark.parametrize("end", [2, [2, 5]])
def test_end_tokens_go_with_the_tokenizer(paths, tmp_path, end):
    """Tokens are named by their numbers, which are those of the model that the tokenizer is of.

    What transformers derives is no loss, but what somebody has changed since is.
    """
    derived = json.dumps({"_from_model_config": True, "eos_token_id": end})
    Path(paths[1], "generation_config.json").write_text(derived)
    config = parse(ace_config(paths, tokenizer={"source": paths[1]}))
    for found in (lost_model_files(config, ()), add_model_files(config, tmp_path / "out")):
        assert str(found.get("generation_config.json")) == (str(None) if end == 2 else paths[1])
        assert str(found["processor_config.json"]) == paths[0]


@pytest.mark.parametrize("has", ["nothing", "chat_template.jinja", "in the config", "configured"])
def test_a_template_is_added_where_there_is_none(paths, tmp_path, has):
    """Names of models may be relative to the folder of the result."""
    out = tmp_path / "out"
    own = {"chat_template": "{{ own }}"} if has == "in the config" else {}
    (out / "tokenizer_config.json").write_text(json.dumps(own))
    if has == "chat_template.jinja":
        (out / has).write_text("{{ own }}")
    configured = {"chat_template": "chatml"} if has == "configured" else {}
    config = parse(ace_config([Path(path).name for path in paths], **configured))
    assert not add_model_files(config, out)
    added = add_model_files(config, out, beside=tmp_path)
    assert ("chat_template.jinja" in added) == (has == "nothing")
    assert added.keys() >= FILES.keys()


def test_a_hub_that_does_not_answer_lacks_no_file(monkeypatch):
    """The cache is that of mergekit's loaders, which `--transformers-cache` names."""
    refused, no_network = LocalEntryNotFoundError("429"), LocalEntryNotFoundError("")
    refused.__cause__ = HfHubHTTPError("", response=Mock())
    answers = [refused, no_network, RemoteEntryNotFoundError("", response=Mock())]

    def download(cache_dir, **_):
        raise answers.pop(0) if cache_dir == "here" else AssertionError(cache_dir)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(LoaderCache(), "hf_cache_dir", "here")
    model = ModelPath(path="org/model")
    with pytest.raises(FileError, match="429"):
        find_model_file(model, "processor_config.json")
    assert {find_model_file(model, "processor_config.json") for _ in answers[:]} == {None}
