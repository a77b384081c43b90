# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: what can be known of a merge and its models before it starts."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoTokenizer

from mergekit_ace.adapters.read import check_adapters
from mergekit_ace.architecture import BY_FILES
from mergekit_ace.check.loading import check_loading
from mergekit_ace.files.checkpoints import (
    DTYPES,
    FLOATING,
    GENERATION,
    TEMPLATES,
    TOKENIZER_CONFIG,
    VOCABULARY_FILES,
    Checkpoint,
    Checkpoints,
    config_donor,
    find_model_file,
    headers_only,
    json_or_empty,
    lost_model_files,
    read_checkpoint,
    tokenizer_donor,
)
from mergekit_ace.merge_config import (
    HEADS,
    Finding,
    check_file,
    check_settings,
    layer_lists,
    safetensors_dtype,
)
from mergekit_ace.naming import FileError, in_bytes, listed
from mergekit_ace.planning import (
    MergeEstimate,
    PlannedMerge,
    PlannedTensor,
    Treatment,
    add_unplanned,
    estimate_merge,
    plan_merge,
)

DEQUANTISE = (
    "dequantise it first: load it with transformers, call model.dequantize(), and save it in "
    "bfloat16"
)
_MARGIN = 1.02  # of the result's size, for indices, tokenizers and the rest
_ANOTHER = "replace the model by one of the same architecture, or save it again"
# What changes the function that the same weights compute. mergekit writes the base's config.
_FUNCTION = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act activation_function rope_theta partial_rotary_factor rms_norm_eps layer_norm_epsilon
    layer_norm_eps sliding_window max_position_embeddings max_window_layers attention_bias
    num_experts_per_tok num_local_experts num_experts n_routed_experts
""".split()


@dataclass(frozen=True)
class Preflight:
    """Result of a check: findings, errors first; the plan, if there is one; what is merged."""

    findings: Sequence[Finding]
    plan: PlannedMerge | None = None
    checkpoints: Checkpoints = field(default_factory=dict)
    facts: Sequence[str] = ()  # lines on the merge, what it takes, and its models

    @property
    def errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    @property
    def text(self) -> str:
        verdict = "nothing to complain about: the merge may start"
        if self.findings:
            verdict = f"errors: {self.errors}, warnings: {len(self.findings) - self.errors}"
        return "\n".join([*(finding.text for finding in self.findings), verdict, *self.facts])


def check_merge(
    path: Path,
    options: MergeOptions,
    out: Path | None = None,
    unplanned: Treatment | None = None,
    *,
    strict: bool = True,
) -> Preflight:
    """Check a config and its models by configs, tokenizers and headers.

    Args:
        out: where the result is to be written; the present folder's disk by default.
        unplanned: what the `mergekit-ace merge` that is about to start, and looks after the disk
            itself, does with tensors that mergekit does not plan; None for `mergekit-yaml`.
        strict: without, only what hinders the plan is found.
    """
    LoaderCache().setup(options)
    config, findings = check_file(path)
    if config is None:
        return Preflight(findings)
    findings = findings if strict else []
    checkpoints: dict[ModelReference, Checkpoint] = {}
    plan, facts = None, [""]
    models = sorted(config.referenced_models(), key=lambda m: (m != config.base_model, str(m)))
    for model in models:
        try:
            checkpoints[model] = read_checkpoint(model)
        except FileError as error:
            findings.append(Finding.error(str(error)))
    if len(checkpoints) == len(models):
        if strict:
            for look in (_check_dtypes, _check_heads, _check_functions, _check_chat_templates,
                         _check_tokenizers):  # fmt: skip
                findings += look(checkpoints, config)
        with headers_only(list(checkpoints.values())):
            if strict:
                bare = unplanned is None and not options.lora_merge_cache
                findings += check_adapters(checkpoints, bare)
            try:
                plan = plan_merge(config, options, checkpoints)
                plan, told = add_unplanned(plan, checkpoints, unplanned or "error")
                findings += told
                whole = plan.saves.keys() == checkpoints[config_donor(config)].headers.keys()
                told_all = all(finding.level != "error" for finding in told)
                if strict and told_all and (config.slices or not whole):
                    findings += check_loading(plan, checkpoints)
            except Exception as error:  # mergekit raises whatever its parts do
                text = str(error) or type(error).__name__
                if isinstance(error, KeyError):  # mergekit looks a module up
                    text = f"the architecture has no part {text}; most have one, called `default`"
                if not (strict and text.startswith("Unimplemented merge method")):
                    findings.append(Finding.error(text))  # that one `check_file` has told
    if plan is not None and strict:
        estimate = estimate_merge(plan, checkpoints)
        findings += _check_tensors(plan.tensors, checkpoints)
        findings += _check_experts(plan, checkpoints)
        findings += _check_padding(plan, checkpoints)
        findings += check_settings(plan)
        if unplanned is None:
            findings += _check_mergekit_yaml(plan)
            findings += _check_disk(estimate, out or Path())
        about = getattr(plan.method, "about", plan.method.spec.pretty_name)
        facts = [estimate.text, "", f"method  {about or config.merge_method}"]
    facts += [_model_line(one, config.base_model) for one in checkpoints.values()]
    findings.sort(key=lambda finding: finding.level != "error")
    return Preflight(findings, plan, checkpoints, facts)


def _model_line(checkpoint: Checkpoint, base: ModelReference | None) -> str:
    role = "base" if checkpoint.model == base else "expert"
    parts = [f"{len(checkpoint.headers)} tensors", in_bytes(checkpoint.bytes)]
    parts += sorted(checkpoint.entries_by_dtype)
    if size := checkpoint.config.get("vocab_size"):
        parts.append(f"vocabulary {size}")
    return f"{role:>6}  {checkpoint.model}: {', '.join(parts)}"


def _check_disk(estimate: MergeEstimate, out: Path) -> Iterator[Finding]:
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free, wanted = shutil.disk_usage(place).free, int(_MARGIN * estimate.written)
    if free < wanted:
        yield Finding.error(
            f"the result takes {in_bytes(wanted)}, but {place} has {in_bytes(free)} left",
            "free some space, or write elsewhere",
        )


def _check_mergekit_yaml(plan: PlannedMerge) -> Iterator[Finding]:
    """Find what `mergekit-yaml` fails over, merges otherwise, or leaves out of the result."""
    config, donor, trust = plan.config, config_donor(plan.config), plan.options.trust_remote_code
    weights = [tensor.task.output_weight for tensor in plan.tensors]
    kept = [w.name for w in weights if w.force_dtype and safetensors_dtype(w.force_dtype)]
    if kept:
        yield Finding.warning(
            f"mergekit-yaml rounds {len(kept)} tensors that all models keep in a wider dtype than "
            f"the others: {listed(kept)}",
            "merge by mergekit-ace merge, which leaves them in it",
        )
    if plan.architecture.expected_model_type == BY_FILES:
        yield Finding.warning(
            f"mergekit has no description of {donor} that fits its files: mergekit-yaml fails, "
            "leaves tensors out, or packs experts",
            "merge by `mergekit-ace merge`, which goes by the names of the tensors",
        )
    settings = donor.config(trust_remote_code=trust).get_text_config()
    for name, entries in layer_lists(config, trust).items():
        if len(entries) != len(getattr(settings, name, entries)):
            yield Finding.error(
                f"the result has {len(entries)} layers, and its config.json would have "
                f"{len(getattr(settings, name))} `{name}`: mergekit-yaml fails at its very end",
                "merge by `mergekit-ace merge`, which writes those of the slices",
            )
    lost = lost_model_files(config, tuple(plan.architecture.tagalong_files or ()))
    if lost:
        end = ", so that it may not know all tokens that end a text" if GENERATION in lost else ""
        yield Finding.warning(
            f"mergekit-yaml leaves {', '.join(sorted(lost))} of {next(iter(lost.values()))} out of "
            f"the result{end}",
            "add what is missing by `mergekit-ace card OUT`, or merge by `mergekit-ace merge`",
        )


def _check_dtypes(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find dtypes that differ, cannot be merged, or are rounded too early."""
    main = {model: checkpoint.main_dtype for model, checkpoint in checkpoints.items()}
    wanted = DTYPES.get(safetensors_dtype(config.dtype))
    for model, own in main.items():
        yield from _check_quantised(checkpoints[model])
        if wanted and own in FLOATING and torch.promote_types(wanted, DTYPES[own]) != wanted:
            yield Finding.warning(
                f"`dtype: {config.dtype}` rounds {model}, stored as {own}, too early",
                "write `dtype: float32` and `out_dtype: bfloat16`: rounded once, at the end",
            )
    if not config.dtype and len(set(main.values())) > 1:
        text = ", ".join(f"{model}: {dtype}" for model, dtype in main.items())
        yield Finding.warning(
            f"the checkpoints have different dtypes ({text}); the result has the widest",
            "add a line `dtype: float32`, and `out_dtype: bfloat16` for a small result",
        )


def _check_quantised(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a model whose tensors are not its weights, but codes of them."""
    settings, counts = checkpoint.config.get("quantization_config"), checkpoint.entries_by_dtype
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else ""
    if checkpoint.quantised:
        yield Finding.warning(
            f"{checkpoint.model} is quantised ({method}): its tensors are dequantised to bfloat16, "
            "which the result is then; mergekit-yaml would merge their codes as weights",
            "merge by `mergekit-ace merge`; take the original in bfloat16, where there is one",
        )
    elif method or checkpoint.main_dtype not in (*FLOATING, ""):
        by = f" (quantised: {method})" if method else ""
        yield Finding.error(
            f"{checkpoint.model} is stored as {', '.join(counts)}{by}, which cannot be merged",
            f"{DEQUANTISE}. If these are its weights, remove quantization_config from config.json",
        )


def _check_heads(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find heads that are missing or tied in some models; mergekit takes embeddings for them."""
    base = config.base_model
    stored = {m: next(filter(_is_head, one.headers), "") for m, one in checkpoints.items()}
    ties = {model: _ties_head(checkpoint.config) for model, checkpoint in checkpoints.items()}
    some = next(filter(None, stored.values()), "")
    for model, head in stored.items():
        if not head and ties[model] is False and some:
            yield Finding.error(
                f"{model} has no {some}, and its config.json does not tie it to the embedding",
                "save it with its head, or set tie_word_embeddings: true if it has none",
            )
        elif base is not None and {ties[base], ties[model]} == {True, False}:
            tied, own = (base, model) if ties[base] else (model, base)
            if stored[own] and (tied == base or not stored[tied]):
                yield Finding.error(
                    f"{tied} ties its head to the embedding, and {own} has a head of its own",
                    "save both tied, or both with tie_word_embeddings: false and an lm_head",
                )


def _is_head(name: str) -> bool:
    return name in HEADS or name.endswith((".lm_head.weight", ".embed_out.weight"))


def _ties_head(config: Mapping[str, Any]) -> bool | None:
    """Return whether transformers ties the head to the embedding; None where that is unknown."""
    text, kind = config.get("text_config"), config.get("model_type", "")
    given = {**(text if isinstance(text, dict) else {}), **config}
    if "tie_word_embeddings" in given or kind not in CONFIG_MAPPING:
        return given.get("tie_word_embeddings")
    return getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", None)


def _check_functions(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find what the base's `config.json` says differently of an expert's weights."""
    base = config.base_model
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
                f"{model} has another config than the base model ({listed(changed)})",
                "the result has the base's config.json: adjust it there if the experts' is right",
            )


def _function(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `_FUNCTION`, with those of rotary positions among them.

    These stand in `rope_scaling` up to transformers 4, and later in `rope_parameters`; those of a
    multimodal model in its `text_config`. transformers reads `mrope` as `default`.
    """
    config = {**(text if isinstance(text := config.get("text_config"), dict) else {}), **config}
    rotary: dict[str, Any] = {}
    for part in (config.get("rope_scaling"), config.get("rope_parameters")):
        rotary |= part.get("full_attention", part) if isinstance(part, dict) else {}
    kind = str(rotary.pop("rope_type", rotary.pop("type", "default"))).replace("mrope", "default")
    return {n: config[n] for n in _FUNCTION if n in config} | {"rope_type": kind} | rotary


def _check_chat_templates(
    checkpoints: Checkpoints, config: MergeConfiguration
) -> Iterator[Finding]:
    """Find a result without a chat template though all experts have one."""
    donor = tokenizer_donor(config)
    speaks = {
        model: bool(json_or_empty(find_model_file(own, TOKENIZER_CONFIG)).get("chat_template"))
        or any(find_model_file(own, name) for name in TEMPLATES)
        for model in checkpoints
        for own in [model.lora or model.model]
        if _has_tokenizer(own)
    }
    if not config.chat_template and not speaks.pop(donor, True) and speaks and all(speaks.values()):
        yield Finding.warning(
            f"{donor}, whose tokenizer the result has, has no chat template; all others have one",
            "add the line `chat_template: auto`, which takes that of most models",
        )


def _check_tokenizers(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find tokens with other numbers, or what keeps mergekit from aligning them."""
    base = config.base_model or next(iter(checkpoints))
    tokens = {m: _tokens(m.model) for m in checkpoints if m.lora is None or m == base}
    for model, own in tokens.items():
        if not own and find_model_file(model.model, "tokenizer.json"):
            message = f"the tokenizer of {model} is damaged: tokenizer.json cannot be read"
            yield Finding.error(message, "download or save it again")
    aligned = bool(config.tokenizer or config.tokenizer_source)
    for model in dict.fromkeys([base, tokenizer_donor(config)]) if aligned else ():
        if not _has_tokenizer(model.model):
            yield Finding.error(
                f"tokenizer: {model} has no tokenizer to begin with",
                "take the files of its tokenizer into its folder, or remove the lines `tokenizer:`",
            )
    first = base if tokens[base] else next((m for m in tokens if tokens[m]), base)
    known, numbers = tokens[first], {number: token for token, number in tokens[first].items()}
    for model, own in tokens.items() if config.base_model and not aligned else ():
        different = [
            repr(token)
            for token, number in sorted(own.items())
            if known.get(token, number) != number or numbers.get(number, token) != token
        ]
        new = [repr(token) for token in sorted(own.keys() - known.keys())]
        if different:
            yield Finding.error(
                f"{model} numbers {len(different)} tokens differently from "
                f"{'the base model' if first == base else first}: {listed(different)}",
                "add the line `tokenizer: {source: base}` (or union), which aligns them",
            )
        elif new and first == base:
            yield Finding.warning(
                f"{model} has {len(new)} tokens that the base model's tokenizer, which the "
                f"result gets, lacks: {listed(new)}",
                "add the lines `tokenizer: {source: union}`, if the result needs them",
            )


def _has_tokenizer(source: ModelPath) -> bool:
    return any(find_model_file(source, name) for name in VOCABULARY_FILES)


def _tokens(source: ModelPath) -> dict[str, int]:
    """Return the numbers of all tokens; empty without a tokenizer that can be read here."""
    fast = find_model_file(source, "tokenizer.json")
    with suppress(Exception):  # of many kinds: a damaged file, a missing library, code of its own
        if fast:
            return Tokenizer.from_file(str(fast)).get_vocab()
        if _has_tokenizer(source):
            options: Any = {"revision": source.revision, "trust_remote_code": False}
            options["cache_dir"] = LoaderCache().hf_cache_dir
            return AutoTokenizer.from_pretrained(source.path, **options).get_vocab()
    return {}


def _check_tensors(tensors: Sequence[PlannedTensor], checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find tensors that a model lacks, or that have another shape, or are no weights.

    Whole numbers that are the same in all models are copied (counters, masks).
    """
    wrong: dict[tuple[ModelReference, str], list[str]] = defaultdict(list)
    for tensor in tensors:
        headers, output = tensor.headers(checkpoints), tensor.task.output_weight
        dtypes = {header.dtype for header in headers.values()}
        copied = len(dtypes) == 1 and dtypes <= {"I64"}
        aligned = tensor.task.gather_tensors is not tensor.gather  # rows, by their tokens
        first = next((headers[m] for m in (tensor.base, *headers) if m in headers), None)
        for model, weight in tensor.weights.items():
            header = headers.get(model)
            if header is None or first is None:
                needed = not output.optional or model == tensor.base
                if headers or not output.optional:
                    wrong[model, "needed" if needed else "lacking"].append(weight.name)
            elif header.dtype not in FLOATING and not copied:
                wrong[model, header.dtype].append(weight.name)
            elif header.shape != first.shape and not aligned:
                kind = "shape" if output.vocabulary_axis is None else "vocabulary"
                text = f"{tensor.name} {header.shape} instead of {first.shape}"
                wrong[model, kind].append(text)
    for (model, kind), names in wrong.items():
        where, lacks = listed(names, 3), f"{model} lacks {len(names)} of {len(tensors)} tensors"
        if kind == "needed":
            yield Finding.error(f"{lacks}: {where}", _ANOTHER)
        elif kind == "lacking":
            remedy = f"{_ANOTHER}; otherwise these tensors are merged without it"
            yield Finding.warning(f"{lacks}: {where}", remedy)
        elif kind == "vocabulary":
            remedy = "align them: add the line `tokenizer: {source: base}` (or union)"
            yield Finding.error(f"{model} has another vocabulary: {names[0]}", remedy)
        elif kind == "shape":
            yield Finding.error(
                f"{model} has {len(names)} tensors of another shape: {where}",
                f"remove {model}, or set base_model to the model that it was fine-tuned from",
            )
        elif not any(_check_quantised(checkpoints[model])):  # else it is said of the whole model
            yield Finding.error(
                f"{model} has {len(names)} tensors in {kind}, which cannot be merged: {where}",
                f"save it in bfloat16, float16 or float32; if it is quantised, {DEQUANTISE}",
            )


def _check_experts(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find models of which --allow-crimes would merge nothing."""
    merged = {model for tensor in plan.tensors for model in tensor.headers(checkpoints)}
    for model in (one.model for one in plan.config.models or () if plan.options.allow_crimes):
        if model not in merged:
            names = listed([*checkpoints[model].headers], 1)
            yield Finding.error(f"{model} has no tensor in common with the base: {names}", _ANOTHER)


def _check_padding(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find rows of padding that `tokenizer:` cuts off the base's vocabulary, or adds to it."""
    config, tensors = plan.config, plan.tensors
    aligned = next((t for t in tensors if t.task.gather_tensors is not t.gather), None)
    base = config.base_model or next(iter(checkpoints))
    header = aligned.headers(checkpoints).get(base) if aligned else None
    if aligned is None or header is None:
        return
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    named: dict[str, list[Any]] = {"base": [base], "union": list(checkpoints)}
    models = named.get(str(source), [source])
    known = {token for m in models if m in checkpoints for token in _tokens(m.model)}
    tokens = len(known.union((config.tokenizer and config.tokenizer.tokens) or ()))
    rows = header.shape[aligned.task.output_weight.vocabulary_axis]
    left = tokens + -tokens % (plan.vocabulary_multiple or 1)
    if known and tokens <= rows and (left < rows or rows < (plan.vocabulary_multiple or 0)):
        yield Finding.warning(
            f"{aligned.name} has {rows} rows in {base}, and {left} in the result, whose tokenizer "
            f"has {tokens} tokens: other rows are padding",
            f"write `pad_to_multiple_of: {rows}` below `tokenizer:` to keep {rows} rows",
        )
