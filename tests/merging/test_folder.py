# SPDX-License-Identifier: Apache-2.0
"""Nothing foreign in the directory of the result, and nothing that the merge reads, is replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import ace_config, save_tokenizer, tiny_llama
from coefficient_files import make_file
from filelock import FileLock
from sharded import VOCABULARY, assert_same, command, contents, linear, refusal, write_config

from mergekit_ace.files.checkpoints import MORE_TEMPLATES
from mergekit_ace.merging.output import LOCK_FILE, MANIFEST_FILE, SCRATCH_FOLDER


@pytest.fixture
def config(tmp_path, llamas) -> Path:
    return write_config(tmp_path / "merge.yml", linear(llamas))


def refused(config: Path, out: Path | str) -> str:
    """What is said to a merge that is refused in spite of --overwrite, and changes nothing."""
    before = contents(Path(out))
    text = refusal(config, out, "--overwrite")
    assert contents(Path(out)) == before
    return text


def test_a_model_is_not_overwritten_unasked(tmp_path, config):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "embeddings.safetensors").write_text("{}")  # no model's
    text = refused(config, out)
    assert "holds files that are none of a merge (embeddings.safetensors); choose a new" in text
    (out / "adapter_config.json").write_text("{}")
    assert "holds a model that is none of a merge (adapter_config.json);" in refusal(config, out)
    assert {*contents(out).values()} == {b"{}"}
    command(config, out, "--overwrite")
    assert not (out / "adapter_config.json").exists(), "transformers would load an adapter"
    (out / "embeddings.safetensors").unlink()
    command(config, tmp_path / "again" / "merged")
    assert_same(tmp_path / "again" / "merged", out)


def test_an_input_in_the_output(tmp_path, config, llamas, speakers):
    """A model that is merged, or whose files are links; coefficients; a report of its name."""
    assert "which is read; choose" in refused(config, llamas[-1])
    out, linked = tmp_path / "out", tmp_path / "linked"
    shutil.copytree(llamas[1], out)
    linked.mkdir()
    for path in out.iterdir():
        (linked / path.name).symlink_to(path)
    save_tokenizer(out, VOCABULARY)
    for settings in (
        linear([llamas[0], str(linked)]),
        linear(speakers, tokenizer={"source": str(out)}),
    ):
        write_config(config, settings)
        assert f"{out} holds {out}" in refused(config, out)
    shutil.rmtree(out)
    out.mkdir()
    file = out / "model-coefficients.safetensors"
    make_file(list(tiny_llama().state_dict()), llamas[1:]).save(file)
    parameters = {"coefficients": str(file)}
    write_config(config, ace_config(llamas, merge_method="statsmerging", parameters=parameters))
    assert f"{out} holds {file}, which is read" in refused(config, out)
    (out / SCRATCH_FOLDER).mkdir()
    for report in (out / "README.md", out / SCRATCH_FOLDER / "report.jsonl"):
        write_config(config, ace_config(llamas, parameters={"report": str(report)}))
        assert f"may replace the report {report}; move it" in refused(config, out)


def test_what_may_lie_in_the_output(tmp_path, llamas):
    """A report, and the config of the former merge: the lines of another merge stay."""
    out = tmp_path / "out"
    settings = ace_config(llamas, parameters={"report": str(out / "report.jsonl")})
    command(write_config(tmp_path / "merge.yml", settings), out)
    lines = (out / "report.jsonl").read_text()
    command(out / "mergekit_config.yml", out, "--overwrite")
    again = (out / "report.jsonl").read_text()
    assert again.startswith(lines)
    assert again.count("\n") == 2 * lines.count("\n")


@pytest.mark.parametrize("name", [SCRATCH_FOLDER, MORE_TEMPLATES, LOCK_FILE])
def test_links_that_lead_elsewhere(tmp_path, config, name):
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.mkdir()
    (victim / "one.jinja").write_text("kept")
    out.mkdir()
    (out / name).symlink_to(victim / "one.jinja" if name == LOCK_FILE else victim)
    assert f"{out / name} is a link" in refused(config, out)
    assert (victim / "one.jinja").read_text() == "kept"


def test_two_runs_into_one_directory(tmp_path, config):
    """What a kill has left there may be a link."""
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.write_text("kept")
    out.mkdir()
    (out / f"{MANIFEST_FILE}.partial").symlink_to(victim)
    with FileLock(out / LOCK_FILE):
        assert "another run is writing to" in refusal(config, out, "--overwrite")
    command(config, out)
    assert victim.read_text() == "kept"
