# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with the models of a merge: tensors, dtypes, heads, tokens, adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoTokenizer

from mergekit_ace.adapters.read import OtherAdapterError, read_adapters
from mergekit_ace.files.headers import (
    DTYPES,
    FLOATING,
    DamagedFileError,
    TensorHeader,
    json_or_empty,
)
from mergekit_ace.files.model_files import TOKENIZER_CONFIG, VOCABULARY_FILES
from mergekit_ace.files.models import Checkpoint, Checkpoints
from mergekit_ace.merge_config import HEADS, Finding
from mergekit_ace.naming import listed, same_name
from mergekit_ace.planning import ConfigError, PlannedMerge, PlannedTensor

# Share of whole numbers in the entries of a model that masks and counters stay below, and a
# quantised model does not.
WHOLE_NUMBERS = 0.001
DEQUANTISE = (
    "dequantise it first: load it with transformers, call model.dequantize(), and save it in "
    "bfloat16; or take the checkpoint that it was made from"
)
AS_NUMBERS = f"save it in bfloat16, float16 or float32; if it is quantised, {DEQUANTISE}"
ALIGN = "add the line `tokenizer: {source: base}` (or union), which aligns the embeddings"
# What changes the function that the same weights compute. mergekit writes the base's config.
FUNCTION = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act activation_function rope_theta partial_rotary_factor rms_norm_eps
    layer_norm_epsilon layer_norm_eps sliding_window max_position_embeddings
    max_window_layers attention_bias num_experts_per_tok num_local_experts num_experts
    n_routed_experts
""".split()


def check_checkpoints(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find models that do not fit together, or cannot be merged, before a merge is planned."""
    yield from check_dtypes(checkpoints, config)
    yield from _check_heads(checkpoints, config.base_model)
    yield from _check_configs(checkpoints, config.base_model)
    yield from _check_class_names(checkpoints)
    try:
        yield from _check_tokenizers(checkpoints, config)
    except DamagedFileError as error:
        yield Finding.error("tokenizers", str(error))


def safetensors_dtype(name: str | None) -> str:
    """Return what a safetensors file calls a dtype that a config names; empty for none of these."""
    dtype = getattr(torch, (name or "").removeprefix("torch."), None)
    return next((own for own in FLOATING if DTYPES[own] == dtype), "")


def check_dtypes(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find dtypes that differ, cannot be merged, or are rounded too early."""
    main = {model: checkpoint.main_dtype for model, checkpoint in checkpoints.items()}
    wanted = safetensors_dtype(config.dtype)
    for model, checkpoint in checkpoints.items():
        yield from _check_quantised(checkpoint)
        precision = checkpoint.precision or main[model]
        if main[model] not in FLOATING or not wanted:
            continue
        if torch.promote_types(DTYPES[wanted], DTYPES[precision]) != DTYPES[wanted]:
            yield Finding.warning(
                "dtypes",
                f"`dtype: {config.dtype}` rounds {model}, stored as {precision}, before its task "
                "vector is formed",
                "write `dtype: float32` and `out_dtype: bfloat16`: rounded once, at the end",
            )
    if not config.dtype and len(set(main.values())) > 1:
        text = ", ".join(f"{model}: {dtype}" for model, dtype in main.items())
        yield Finding.warning(
            "dtypes",
            f"the checkpoints have different dtypes ({text}), and the result has the widest of "
            "each tensor's",
            "add a line `dtype: float32`, and `out_dtype: bfloat16` for a small result",
        )


def _check_quantised(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a model whose tensors are not its weights, but codes of them."""
    model, dtype = checkpoint.model, checkpoint.main_dtype
    settings = checkpoint.config.get("quantization_config")
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else ""
    if not method and (dtype in FLOATING or not dtype):
        return
    counts = checkpoint.entries_by_dtype
    codes = {name: count for name, count in counts.items() if name not in FLOATING}
    if sum(codes.values()) > WHOLE_NUMBERS * sum(counts.values()):
        by = f" (quantised: {method})" if method else ""
        stored = max(codes, key=lambda name: codes[name])
        message = f"{model} is stored as {stored}{by}, which cannot be merged"
        yield Finding.error("dtypes", message, DEQUANTISE)
    else:
        yield Finding.error(
            "dtypes",
            f"config.json of {model} says that it is quantised ({method}), but its tensors are "
            f"{dtype}",
            "remove quantization_config from config.json if they are its weights; otherwise "
            + DEQUANTISE,
        )


def _check_heads(checkpoints: Checkpoints, base: ModelReference | None) -> Iterator[Finding]:
    """Find heads that the base ties to its embedding and an expert does not, or vice versa.

    mergekit takes the embedding for a head that is not stored.
    """
    stored = {model: _stored_head(checkpoint) for model, checkpoint in checkpoints.items()}
    ties = {model: _ties_head(checkpoint) for model, checkpoint in checkpoints.items()}
    some = next(filter(None, stored.values()), "")
    for model, head in stored.items():
        if not head and ties[model] is False and some:
            yield Finding.error(
                "heads",
                f"{model} has no {some}, and its config.json does not tie the head to the "
                "embedding, which mergekit would take for it",
                "save it again with its head, or set tie_word_embeddings: true in its config.json "
                "if it has none of its own",
            )
        elif base is not None and {ties[base], ties[model]} == {True, False}:
            tied, own = (base, model) if ties[base] else (model, base)
            if stored[own] and (tied == base or not stored[tied]):
                yield Finding.error(
                    "heads",
                    f"{tied} ties its head to the embedding, and {own} has a head of its own",
                    "save both in the same way: tied, or with `tie_word_embeddings`: false and an "
                    "lm_head",
                )


def _stored_head(checkpoint: Checkpoint) -> str:
    return next((name for name in HEADS if name in checkpoint.index.tensor_paths), "")


def _ties_head(checkpoint: Checkpoint) -> bool | None:
    """Return whether transformers ties the head to the embedding; None where that is unknown."""
    text, kind = checkpoint.config.get("text_config"), checkpoint.config.get("model_type")
    given = {**(text if isinstance(text, dict) else {}), **checkpoint.config}
    if "tie_word_embeddings" in given or not kind or kind not in CONFIG_MAPPING:
        return given.get("tie_word_embeddings")
    return getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", None)


def _check_configs(checkpoints: Checkpoints, base: ModelReference | None) -> Iterator[Finding]:
    """Find what the base's `config.json` will say differently of an expert's weights."""
    origin = _function(checkpoints[base].config) if base is not None else {}
    for model, checkpoint in checkpoints.items():
        own = _function(checkpoint.config)
        changed = [
            f"{key}: {own[key]!s:.40} instead of {value!s:.40}"
            for key, value in origin.items()
            if own.get(key, value) != value
        ]
        if changed:
            yield Finding.warning(
                "configs",
                f"{model} has another config than the base model ({listed(changed)})",
                "mergekit writes the base's config.json: adjust it in the result if the experts' "
                "is the right one",
            )


def _function(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `FUNCTION`, with those of rotary positions among them.

    These stand in `rope_scaling` up to transformers 4, and from 5 on, with the base, in
    `rope_parameters`.
    """
    if not config:
        return {}
    rotary: dict[str, Any] = {}
    for part in (config.get("rope_scaling"), config.get("rope_parameters")):
        rotary |= part if isinstance(part, dict) else {}
    kind = rotary.pop("rope_type", rotary.pop("type", "default"))
    return {n: config[n] for n in FUNCTION if n in config} | {"rope_type": kind} | rotary


def _check_class_names(checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find classifiers that give their classes different names, and so other meanings."""
    named: dict[ModelReference, list[str]] = {}
    for model, checkpoint in checkpoints.items():
        classes = checkpoint.config.get("id2label")
        names = [str(name) for name in classes.values()] if isinstance(classes, dict) else []
        if any(not name.startswith("LABEL_") for name in names):  # these are transformers' own
            named[model] = names
    for model, names in named.items():
        first = next(iter(named))
        if names != named[first]:
            yield Finding.warning(
                "classes",
                f"{model} calls its classes {listed(names, 4)}, and {first} calls them "
                f"{listed(named[first], 4)}; a merge of their heads means neither",
                "leave one of them out; `mergekit-ace train` merges classifiers that keep heads of "
                "their own",
            )


def _check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find tokens with other numbers, or what keeps mergekit from aligning them."""
    if config.tokenizer or config.tokenizer_source:
        base = config.base_model or next(iter(checkpoints))
        if not any(checkpoints[base].file(name) for name in VOCABULARY_FILES):
            yield Finding.error(
                "tokenizers",
                f"tokenizer: the base model {base} has no tokenizer, from which mergekit builds "
                "that of the result",
                "take the files of its tokenizer into its folder, or remove the lines `tokenizer:`",
            )
        for checkpoint in checkpoints.values():
            _tokens(checkpoint)  # mergekit takes the base's in the place of a damaged one
    elif config.base_model is not None:
        base = config.base_model
        own = [base, *(m for m in checkpoints if m != base and m.lora is None)]
        first = next((model for model in own if _has_tokens(checkpoints[model])), base)
        for model in own:
            if model != first:
                yield from _compare_tokens(checkpoints[model], checkpoints[first], base)


def _has_tokens(checkpoint: Checkpoint) -> bool:
    files = (checkpoint.file(name) for name in VOCABULARY_FILES if name != TOKENIZER_CONFIG)
    return any(files)


def _compare_tokens(
    checkpoint: Checkpoint, origin: Checkpoint, base: ModelReference
) -> Iterator[Finding]:
    """Find tokens that a model numbers differently from the first model with tokens, or adds."""
    first, second = origin.file("tokenizer.json"), checkpoint.file("tokenizer.json")
    if first and second and first.read_bytes() == second.read_bytes():
        return
    known, tokens = _tokens(origin), _tokens(checkpoint)
    by_number = {number: token for token, number in known.items()}
    different = sorted(
        token
        for token, number in tokens.items()
        if known.get(token, number) != number or by_number.get(number, token) != token
    )
    new = sorted(tokens.keys() - known.keys()) if known else []
    first = "the base model" if origin.model == base else origin.model
    if different:
        yield Finding.error(
            "tokenizers",
            f"{checkpoint.model} numbers {len(different)} tokens differently from {first}: "
            f"{listed([repr(token) for token in different])}",
            ALIGN,
        )
    elif new and origin.model == base:
        yield Finding.warning(
            "tokenizers",
            f"{checkpoint.model} has {len(new)} tokens that the base model's tokenizer, which the "
            f"result gets, lacks: {listed([repr(token) for token in new])}",
            "add the lines `tokenizer: {source: union}`, if the result needs them",
        )


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the numbers of all tokens, by whichever files tell them; empty if none does.

    Raises:
        DamagedFileError: they are no numbers, or nothing that a tokenizer has.
    """
    fast, lines = checkpoint.file("tokenizer.json"), checkpoint.file("vocab.txt")
    if fast:
        try:
            return Tokenizer.from_file(str(fast)).get_vocab()
        except Exception as error:  # the library raises nothing more special
            raise DamagedFileError(
                f"the tokenizer of {checkpoint.model} is damaged: {fast.name} cannot be read "
                f"({error}); download or save it again"
            ) from error
    text = lines.read_text(encoding="utf-8", errors="replace") if lines else ""
    # not splitlines: a token may be one of the separators of lines that Unicode has beside these
    tokens = text.removesuffix("\n").split("\n") if text else ()
    numbered = {token: number for number, token in enumerate(tokens)}
    vocabulary = checkpoint.read_json("vocab.json") or numbered
    if vocabulary:
        return {**vocabulary, **checkpoint.read_json("added_tokens.json")}
    return _converted_tokens(checkpoint) if _has_tokens(checkpoint) else {}


def _converted_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the tokens of a file such as `tokenizer.model`, which only transformers reads."""
    path, revision = checkpoint.model.model.path, checkpoint.model.model.revision
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision).get_vocab()
    except Exception:  # of many kinds: a missing library, code of the model's own
        return {}


def planned_headers(
    tensors: Sequence[PlannedTensor], checkpoints: Checkpoints
) -> Iterator[tuple[PlannedTensor, dict[ModelReference, TensorHeader]]]:
    """Yield planned tensors, each with the headers of all models that have it."""
    for tensor in tensors:
        weights = tensor.weights
        found = {m: checkpoints[m].source(weights[m]) for m in tensor.task.model_order}
        yield tensor, {model: header for model, header in found.items() if header is not None}


def check_tensors(tensors: Sequence[PlannedTensor], checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find tensors that a model lacks, or that are stored as something other than weights.

    Whole numbers that are the same in all models are copied (counters, masks); with a `dtype:` they
    are made floating first.
    """
    lacking: dict[tuple[ModelReference, bool], list[str]] = defaultdict(list)
    odd: dict[tuple[ModelReference, str], list[str]] = defaultdict(list)
    for tensor, found in planned_headers(tensors, checkpoints):
        optional = tensor.task.output_weight.optional
        dtypes = {header.dtype for header in found.values()}
        copied = len(dtypes) == 1 and dtypes <= {"I64", "I32", "BOOL"}
        for model, weight in tensor.weights.items():
            if model in found:
                if found[model].dtype not in FLOATING and not copied:
                    odd[model, found[model].dtype].append(weight.name)
            elif found or not optional:
                lacking[model, not optional or model == tensor.base].append(weight.name)
    for (model, fatal), names in lacking.items():
        what = f"{model} lacks {len(names)} of {len(tensors)} tensors: {listed(names)}"
        if fatal:
            remedy = "replace the model by one of the same architecture, or save it again"
            yield Finding.error("tensors", what, remedy)
        else:
            remedy = "save it with them, or expect what the other models make of these tensors"
            yield Finding.warning("tensors", f"{what}; they are merged without it", remedy)
    for (model, dtype), names in odd.items():
        if not any(_check_quantised(checkpoints[model])):  # else it is said of the whole model
            yield Finding.error(
                "dtypes",
                f"{model} has {len(names)} tensors in {dtype}, which cannot be merged: "
                f"{listed(names)}",
                AS_NUMBERS,
            )


def compare_shapes(
    tensors: Sequence[PlannedTensor], checkpoints: Checkpoints, config: MergeConfiguration
) -> Iterator[Finding]:
    """Find tensors of another shape than the base model's, or the first model's."""
    truncated = (isinstance(t.task.gather_tensors, TruncatedVocabulary) for t in tensors)
    aligned = bool(config.tokenizer or config.tokenizer_source) or any(truncated)
    odd: dict[ModelReference, list[str]] = defaultdict(list)
    vocabularies: dict[ModelReference, str] = {}
    for tensor, found in planned_headers(tensors, checkpoints):
        first = found.get(tensor.base) if tensor.base else None
        first = first or next(iter(found.values()), None)
        if first is None:
            continue
        for model, header in found.items():
            text = f"{tensor.name} {header.shape} instead of {first.shape}"
            if header.shape == first.shape:
                continue
            if tensor.task.output_weight.vocabulary_axis is None:
                odd[model].append(text)
            elif not aligned:
                vocabularies.setdefault(model, text)
    for model, texts in odd.items():
        yield Finding.error(
            "shapes",
            f"{model} has {len(texts)} tensors of another shape: {listed(texts, 3)}",
            f"remove {model}, or set base_model to the model that it was fine-tuned from",
        )
    for model, text in vocabularies.items():
        yield Finding.error(
            "vocabularies",
            f"{model} has another vocabulary: {text}",
            "align them: add the line `tokenizer: {source: base}` (or union)",
        )


def check_padding(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find a padded vocabulary of the base that `tokenizer:` cuts to the tokens of the result."""
    base = plan.config.base_model or next(iter(checkpoints))
    aligned = [t for t in plan.tensors if isinstance(t.task.gather_tensors, PermutedVocabulary)]
    header = checkpoints[base].source(aligned[0].weights[base]) if aligned else None
    tokens = _result_tokens(plan.config, checkpoints, base) if header is not None else 0
    rows = header.shape[aligned[0].task.output_weight.vocabulary_axis] if tokens else 0
    left = tokens + -tokens % (plan.vocabulary_multiple or 1)
    if left < rows:
        yield Finding.warning(
            "tokenizers",
            f"{aligned[0].name} has {rows} rows in {base}, and {left} in the result, whose "
            f"tokenizer has {tokens} tokens: the other rows, of padding, are left out",
            f"add `pad_to_multiple_of: {rows}` below `tokenizer:` to keep {rows} rows",
        )


def _result_tokens(
    config: MergeConfiguration, checkpoints: Checkpoints, base: ModelReference
) -> int:
    """Return the number of tokens of a tokenizer that mergekit builds; 0 where that is unknown."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    chosen = {"base": [base], "union": list(checkpoints)}.get(str(source), [source])
    added = config.tokenizer.tokens if config.tokenizer else None
    known = [_tokens(checkpoints[model]) for model in chosen if model in checkpoints]
    return len({*added, *set().union(*known)} if added else set().union(*known))


def check_adapters(
    checkpoints: Checkpoints, options: MergeOptions, *, merged_first: bool
) -> Iterator[Finding]:
    """Find what hinders adapters, or does not fit the models that they are put onto.

    Args:
        merged_first: whether each is merged into its base first, as `mergekit-yaml` does.
    """
    adapted = [(model, model.lora) for model in checkpoints if model.lora is not None]
    for model, lora in adapted:
        if merged_first and options.lora_merge_cache and _is_inferred(model, options):
            yield Finding.error(
                "adapters",
                f"mergekit has to infer the architecture of {model.model}, and infers none of "
                "adapters",
                "merge by mergekit-ace merge",
            )
        try:
            read_adapters([model])[model].check_ties()
        except (OtherAdapterError, ConfigError):  # only PEFT can tell whether it fits
            pass
        except DamagedFileError as error:
            yield Finding.error("adapters", str(error))
        file = Path(lora.path, "adapter_config.json")
        made_for = json_or_empty(file).get("base_model_name_or_path")
        if made_for and not same_name(made_for, model.model.path):
            yield Finding.warning(
                "adapters",
                f"the adapter {model.lora} was trained on {made_for}, not on {model.model}",
                "put it onto the model that it was trained on",
            )
    if adapted and merged_first and not options.lora_merge_cache:
        yield Finding.warning(
            "adapters",
            "mergekit-yaml merges adapters into their base first: "
            f"{listed([str(lora) for _, lora in adapted])}",
            "merge by mergekit-ace merge, which need not; or give --lora-merge-cache DIR and "
            "--lora-merge-dtype float32 to mergekit-yaml and to this check",
        )


def _is_inferred(model: ModelReference, options: MergeOptions) -> bool:
    """Tell whether mergekit has no description of a model's architecture."""
    try:
        return arch_info_for_config(model.config(options.trust_remote_code)) is None
    except Exception:  # of transformers and the Hub; told elsewhere
        return False
