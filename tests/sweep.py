# SPDX-License-Identifier: Apache-2.0
"""Merges a tiny model of every architecture of transformers, and writes what came of it on a page.

    python tests/sweep.py PAGE

Each model is saved with two perturbations of it, `mergekit-ace merge` merges these, and every
tensor of the result's files is compared with the float64 reference, or with the base's.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import transformers
import yaml
from checkpoints import ace_config, check_merge, save_family
from click.testing import CliRunner
from tiny_models import tiny_model
from transformers.models.auto import modeling_auto

from mergekit_ace.cli import main as mergekit_ace

KINDS = {
    "CAUSAL_LM": "Language models",
    "IMAGE_TEXT_TO_TEXT": "Models of images and text",
    "SEQUENCE_CLASSIFICATION": "Classifiers of text",
}
OTHERS = {
    "clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model",
    "vit": "ViTForImageClassification", "resnet": "ResNetForImageClassification",
    "dinov2": "Dinov2Model", "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration", "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2ForCTC",
    "bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel",
    "modernbert": "ModernBertForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM",
    "electra": "ElectraForPreTraining", "deberta-v2": "DebertaV2ForMaskedLM",
}  # fmt: skip
INTRODUCTION = f"""# Which architectures merge

`tests/sweep.py` wrote this page with transformers {transformers.__version__}. It builds
a tiny model of each class, merges two perturbations of it by `ace`, and compares every
tensor of the files with a float64 reference. *Not built* are types of which it could
make no small model.
"""


def classes() -> Iterator[tuple[str, str, str]]:
    """Yield kind, model type and name of every class."""
    for key, kind in KINDS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{key}_MAPPING_NAMES")
        for model_type, name in names.items():
            yield kind, model_type, name if isinstance(name, str) else name[0]
    for model_type, name in OTHERS.items():
        yield "Others", model_type, name


def outcome(model_type: str, name: str) -> tuple[str, str]:
    """Build a family of a class and merge it; what came of it, and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with suppress(NotImplementedError), torch.device("meta"):  # some cannot be built there
                if tiny_model(name, model_type).num_parameters() > 1_500_000:
                    return "not built", "its smallest config is large"
            model = tiny_model(name, model_type)
            paths = save_family(model, Path(folder))
            type(model).from_pretrained(paths[0])
        except Exception as error:
            return "not built", f"{type(error).__name__}: {error}"
        config, out = Path(folder, "merge.yml"), Path(folder, "merged")
        config.write_text(yaml.safe_dump(ace_config(paths)))
        answer = CliRunner().invoke(mergekit_ace, ["merge", str(config), str(out), "--quiet"])
        if answer.exit_code:
            text = answer.output.replace(folder, "") or repr(answer.exception)
            return ("FAILED" if any(out.glob("*.safetensors")) else "refused"), text
        try:
            check_merge(type(model), paths, out, 1e-4)
        except Exception as error:
            return "WRONG", f"{type(error).__name__}: {error}"
        return "works", ""


def write_page(page: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """Write kinds, model types, what came of them and why."""
    counts = Counter(result for _, _, result, _ in rows)
    lines = [INTRODUCTION, *(f"* {result}: {count}" for result, count in counts.most_common())]
    for kind in dict.fromkeys(kind for kind, *_ in rows):
        lines += ["", f"## {kind}"]
        for result, text in (("works", "These work"), ("not built", "Not built")):
            types = [f"`{name}`" for own, name, found, _ in rows if (own, found) == (kind, result)]
            lines += ["", f"{text}: {', '.join(types)}."] if types else []
        lines += [
            f"\n`{name}`: {result}, {why}"
            for own, name, result, why in rows
            if own == kind and result not in ("works", "not built")
        ]
    page.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Try all classes, and write the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for kind, model_type, name in classes():
        result, why = outcome(model_type, name)
        rows.append((kind, model_type, result, " ".join(why.split())[:80]))
        print(*rows[-1], flush=True)
    write_page(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
