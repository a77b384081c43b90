# SPDX-License-Identifier: Apache-2.0
"""Whether a result is a whole model: does transformers find every tensor of its config in it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mergekit.common import ModelPath, ModelReference
from mergekit.io import ShardedTensorIndex

from mergekit_ace.headers import read_headers
from mergekit_ace.naming import without_numbers
from mergekit_ace.preflight.config_rules import listed
from mergekit_ace.preflight.loading import LoadedHeaders, load_headers


def verify_model(
    folder: Path, donor: ModelReference, donor_folder: Path, *, trust_remote_code: bool
) -> str:
    """Return what is wrong with a result as transformers would load it; empty for a whole model.

    Only headers are read. What the model that gave its config lacks, or has too many of, the result
    may as well: a backbone without the head that its config names, for example.

    Args:
        folder: of the result.
        donor: the model whose config the result has.
        donor_folder: where its weights are.
        trust_remote_code: whether the code that a model brings may run.

    Raises:
        UnknownArchitectureError: transformers does not know the architecture.
    """
    result = _load(merged_model(folder), folder, trust_remote_code)
    if result == LoadedHeaders():
        return ""
    origin = _load(donor, donor_folder, trust_remote_code)
    return "; ".join(_differences(result, origin))


def merged_model(folder: Path) -> ModelReference:
    """Return mergekit's reference to a folder, whatever its name."""
    return ModelReference(model=ModelPath(path=str(folder)))


def _load(model: ModelReference, folder: Path, trust_remote_code: bool) -> LoadedHeaders:
    config = model.config(trust_remote_code=trust_remote_code)
    index = ShardedTensorIndex.from_disk(str(folder))
    headers = read_headers(index.tensor_paths, index.base_path)
    return load_headers(config, headers, trust_remote_code=trust_remote_code)


def _differences(result: LoadedHeaders, origin: LoadedHeaders) -> Iterator[str]:
    if result.failure and not origin.failure:
        yield f"its tensors cannot be put together: {result.failure}"
    missing = _only(result.missing, origin.missing)
    if missing:
        yield f"it lacks {len(missing)} tensors: {listed(missing)}"
    unexpected = _only(result.unexpected, origin.unexpected)
    if unexpected:
        yield f"its config has no place for {len(unexpected)} tensors: {listed(unexpected)}"
    odd = _other_shapes(result.mismatched, origin.mismatched)
    if odd:
        yield f"{len(odd)} tensors have another shape than in its config: {listed(odd, 3)}"


def _only(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return names of no kind that is known; a result may have more layers than its origin."""
    kinds = {without_numbers(name) for name in known}
    return sorted(name for name in names if without_numbers(name) not in kinds)


def _other_shapes(result: Mapping, origin: Mapping) -> list[str]:
    return [
        f"{name} {stored} instead of {expected}"
        for name, (stored, expected) in sorted(result.items())
        if origin.get(name) != (stored, expected)
    ]
