# SPDX-License-Identifier: Apache-2.0
"""RegMean and Fisher merging against their formulas in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matrices import deltas_of, family
from measured_files import Kind, random_covariance, write_statistics
from mergekit.merge_methods import merge_tensors
from naive_peers import naive_fisher, naive_regmean
from reference import naive_mean, task_vector_error
from torch import Tensor

KINDS: dict[str, Kind] = {"regmean": "covariance", "fisher": "fisher"}
NAIVE = {"regmean": naive_regmean, "fisher": naive_fisher}
both = pytest.mark.parametrize("method", KINDS)


def merge(method: str, path: str | None, tensors: list[Tensor], name: str = "w", **parameters):
    given = {"statistics": path, **parameters}
    return merge_tensors(tensors, method, base_index=0, name=name, parameters=given)


def measurements(rng, method: str, experts: int, shape=(10, 8)) -> list[Tensor]:
    """What made-up samples tell of experts of a tensor."""
    if method == "regmean":
        return [random_covariance(rng, shape[1]) for _ in range(experts)]
    random, scale = torch.randn(2, experts, *shape, generator=rng)
    return list(random.square() * scale.abs())


def written(folder: Path, method: str, measured: list[Tensor], others: tuple[str, ...] = ()) -> str:
    models = [str(1 + number) for number in range(len(measured))]
    return write_statistics(folder, {KINDS[method]: {"w": measured}}, models, others)


def check(method, merged, tensors, measured, weights=None, scale=1.0, **options) -> None:
    base, *experts = tensors
    found = NAIVE[method](deltas_of(base, experts), measured, weights or [1.0] * 3, **options)
    assert task_vector_error(merged, base + scale * found, base) <= 5e-5


@pytest.mark.parametrize("shape", [(10, 40), (50, 12), (24, 24)])
@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 1.0), ({"off_diagonal": 1.0, "epsilon": 0.01}, 1.0), ({"off_diagonal": 0.1}, 0.7)],
)
def test_regmean(rng, tmp_path, shape, options, scale):
    base, experts = family(rng, *shape, 3)
    covariances = measurements(rng, "regmean", 3, shape)
    path, given = written(tmp_path, "regmean", covariances), {**options, "lambda": scale}
    merged = merge("regmean", path, [base, *experts], **given)
    check("regmean", merged, [base, *experts], covariances, scale=scale, **options)
    stored = [tensor.T for tensor in (base, *experts)]
    turned = merge("regmean", path, stored, layout="transposed", **given)
    torch.testing.assert_close(turned.T, merged)


@pytest.mark.parametrize("shape", [(10, 8), (7,), (3, 2, 4), ()])
@pytest.mark.parametrize(("scale", "floor"), [(1.0, 1e-6), (0.7, 0.5)])
def test_fisher(rng, tmp_path, shape, scale, floor):
    base = torch.randn(shape, generator=rng)
    experts = [base + 0.1 * torch.randn(shape, generator=rng) for _ in range(3)]
    fisher = measurements(rng, "fisher", 3, shape)
    path, weights = written(tmp_path, "fisher", fisher), [1.0, 2.0, 0.5]
    given = {"weight": dict(enumerate(weights, 1)), "lambda": scale, "fisher_floor": floor}
    merged = merge("fisher", path, [base, *experts], **given)
    check("fisher", merged, [base, *experts], fisher, weights, scale, floor=floor)


@both
def test_weights_and_experts_that_did_not_change_a_tensor(rng, tmp_path, method):
    base, (one, two) = family(rng, 10, 8, 2)
    measured, same = measurements(rng, method, 3), base.clone()
    path = written(tmp_path, method, measured)
    assert torch.equal(merge(method, path, [base, same, same]), base)
    assert torch.equal(merge(method, path, [base, one, two], weight={1: 1.0, 2: 0.0}), one)
    merged = merge(method, path, [base, one, same, two], weight={1: 1.0, 2: 1.0, 3: 3.0})
    check(method, merged, [base, one, two], measured[::2], [1.0, 3.0])


@both
def test_where_nothing_was_measured_is_the_mean(rng, tmp_path, method):
    base, experts = family(rng, 10, 8, 2)
    path = written(tmp_path, method, measurements(rng, method, 2), ("v",))
    expected, tensors = naive_mean(base, experts), [base, *experts]
    assert task_vector_error(merge(method, path, tensors, "v"), expected, base) <= 1e-5
    layout = {"layout": "stacked"} if method == "regmean" else {}
    merged = merge(method, path, [torch.stack([t, t]) for t in tensors], "v", **layout)
    assert task_vector_error(merged[1], expected, base) <= 1e-5


@both
def test_what_no_sample_tells_gets_the_mean(rng, tmp_path, method):
    """As of a unit that is never active: there is nothing to regress on."""
    base, experts = family(rng, 10, 8, 2)
    measured = measurements(rng, method, 2)
    for part in measured:
        part[3] = 0
        if method == "regmean":
            part[:, 3] = 0
            part /= part.trace()
    merged = merge(method, written(tmp_path, method, measured), [base, *experts])
    mean = naive_mean(base, experts).float()
    silent = (slice(None), 3) if method == "regmean" else 3
    torch.testing.assert_close(merged[silent], mean[silent])


def test_an_expert_whose_samples_never_came_there(rng, tmp_path):
    base, experts = family(rng, 10, 8, 3)
    covariances = measurements(rng, "regmean", 3)
    covariances[1] = torch.zeros(8, 8)
    merged = merge("regmean", written(tmp_path, "regmean", covariances), [base, *experts])
    check("regmean", merged, [base, *experts[::2]], covariances[::2], [1.0, 1.0])


def test_what_is_wrong_is_said(rng, tmp_path):
    base, experts = family(rng, 10, 8, 2)
    with pytest.raises(ValueError, match="regmean: there are no statistics; run `mergekit-ace"):
        merge("regmean", None, [base, *experts])
    with pytest.raises(ValueError, match=r"'statistics' is 'none.json' \(.*none.json is missing"):
        merge("fisher", "none.json", [base, *experts])
    path = written(tmp_path, "regmean", measurements(rng, "regmean", 2))
    with pytest.raises(ValueError, match=r"holds no fisher; add `measure: \[fisher\]`"):
        merge("fisher", path, [base, *experts])
    path = written(tmp_path / "f", "fisher", measurements(rng, "fisher", 2))
    with pytest.raises(ValueError, match="tensor w does not have the shape that it had"):
        merge("fisher", path, [tensor[:4] for tensor in (base, *experts)])
