# SPDX-License-Identifier: Apache-2.0
"""The peers against naive float64 transcriptions, through mergekit's own entry points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import naive_peers as naive
import pytest
import torch
from checkpoints import ace_config, save_family, state, tiny_llama
from matrices import deltas_of, family
from measured_files import Kind, needs_statistics, random_covariance, write_statistics
from mergekit.merge_methods import merge_state_dicts, merge_tensors
from reference import naive_mean, task_vector_error
from torch import Tensor

from mergekit_ace.plugin import our_methods

PEERS = [
    m.spec.name
    for m in our_methods()
    if type(m).__module__.endswith(".peers") and not needs_statistics(m)
]
# Those that read matrices: method, parameters and the transcription.
MATRIX_METHODS: dict[str, tuple[str, dict, Callable[[list[Tensor]], Tensor]]] = {
    "tsv_m": ("tsv_m", {}, naive.naive_tsv_m),
    "iso_c": ("iso_c", {}, naive.naive_iso_c),
    "iso_cts": ("iso_cts", {}, naive.naive_iso_cts),
    "iso_cts 0.5": ("iso_cts", {"common_fraction": 0.5}, partial(naive.naive_iso_cts, common=0.5)),
    "actmat": ("actmat", {}, naive.naive_actmat),
    "wudi exact": ("wudi", {"solver": "exact"}, naive.naive_wudi_exact),
    "cart": ("cart", {}, naive.naive_cart),
    "cart 0.3": ("cart", {"rank_fraction": 0.3}, partial(naive.naive_cart, fraction=0.3)),
}
every_row = pytest.mark.parametrize("row", MATRIX_METHODS)


def merge(method: str, base: Tensor, experts: list[Tensor], name="w", **parameters) -> Tensor:
    given = {"base_index": 0, "name": name, "parameters": parameters}
    return merge_tensors([base, *experts], method, **given)


@pytest.mark.parametrize(
    ("shape", "experts"), [((20, 70), 2), ((20, 70), 5), ((60, 24), 3), ((32, 32), 2), ((2, 3), 5)]
)  # rows and directions of all experts together are fewer, as many, or more than the columns
@every_row
def test_against_the_transcription(rng, row, shape, experts):
    method, parameters, reference = MATRIX_METHODS[row]
    base, members = family(rng, *shape, experts, noise=0.3)
    base, members = base.double(), [member.double() for member in members]
    expected = base + 0.7 * reference(deltas_of(base, members))
    if method == "cart":  # λ scales what is added to the average
        mean = sum(deltas_of(base, members)) / experts
        expected = base + mean + 0.7 * (reference(deltas_of(base, members)) - mean)
    merged = merge(method, base, members, **parameters, **{"lambda": 0.7})
    assert task_vector_error(merged, expected, base) <= 1e-9
    rounded, *others = (tensor.float() for tensor in (base, *members))
    again = merge(method, rounded.double(), [m.double() for m in others], **parameters)
    assert task_vector_error(merge(method, rounded, others, **parameters), again, base) <= 1e-5


@every_row
def test_directions_that_are_missing_or_repeat_others(rng, row):
    """They must not be filled up with arbitrary ones: adapters, and twice the same expert."""
    method, parameters, reference = MATRIX_METHODS[row]
    base, low = torch.randn(30, 40, generator=rng, dtype=torch.float64), []
    for _ in range(3):
        left = torch.randn(30, 2, generator=rng, dtype=torch.float64)
        low.append(base + 0.1 * left @ torch.randn(2, 40, generator=rng, dtype=torch.float64))
    member = base + torch.randn(30, 40, generator=rng, dtype=torch.float64)
    weak = [low[0], base + 0.01 * (low[1] - base)]
    for members, bar in ((low, 1e-9), (weak, 1e-7), ([member, member.clone()], 1e-7)):
        expected = base + reference(deltas_of(base, members))
        merged = merge(method, base, members, **parameters)
        assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("method", ["tsv_m", "iso_c", "iso_cts"])
def test_the_rounding_of_float32_adds_no_directions(rng, method):
    """Adapters that were added to float32 weights are merged as those added to nothing."""
    base = torch.randn(280, 300, generator=rng)
    factors = torch.randn(3, 280, 3, generator=rng), torch.randn(3, 3, 300, generator=rng)
    deltas = list(0.1 * (factors[0].double() @ factors[1].double()) / 290)
    expected = merge(method, torch.zeros_like(deltas[0]), deltas)
    experts = [(base + delta).float() for delta in deltas]
    merged = merge(method, base, experts).double() - base
    assert task_vector_error(merged, expected, torch.zeros_like(expected)) <= 2e-3
    wide = merge(method, base.double(), [expert.double() for expert in experts])
    assert task_vector_error(wide, base + merged, base) <= 2e-3


@pytest.mark.parametrize("method", PEERS)
def test_frozen_tensors(rng, method):
    base, changed, other = torch.randn(3, 6, 5, generator=rng)
    assert torch.equal(merge(method, base, [base.clone(), base.clone()]), base)
    if method == "lines":
        return  # a coefficient for all experts, changed or not
    merged = merge(method, base, [base.clone(), changed], **{"lambda": 1.0})
    assert torch.equal(merged, changed)
    expected = merge(method, base, [changed, other])
    torch.testing.assert_close(merge(method, base, [changed, base.clone(), other]), expected)


@pytest.mark.parametrize("method", [m for m in PEERS if m not in ("lines", "consensus_ta")])
def test_what_is_no_matrix_gets_the_mean(rng, method):
    for shape in [(7,), (), (1, 7), (3, 2, 2), (0, 4)]:
        base, *members = torch.randn(4, *shape, generator=rng, dtype=torch.float64)
        expected = naive_mean(base, members)
        torch.testing.assert_close(merge(method, base, members), expected, rtol=0, atol=1e-12)


def test_wudi_by_adam(rng):
    base, members = family(rng, 12, 10, 3, noise=0.3)
    expected = base.double() + naive.naive_wudi_adam(deltas_of(base, members), 40, 1e-2)
    merged = merge("wudi", base, members, steps=40, learning_rate=1e-2)
    assert task_vector_error(merged, expected, base) <= 1e-4


@pytest.mark.parametrize("experts", [2, 4])
@pytest.mark.parametrize("shape", [(6, 5), (7,), (2, 3, 4)])
def test_consensus(rng, shape, experts):
    base, *members = torch.randn(1 + experts, *shape, generator=rng, dtype=torch.float64)
    for threshold, least in [(0.4, 2), (1.0, 2), (0.2, 1), (0.6, min(3, experts))]:
        expected = base + 0.5 * naive.naive_consensus(deltas_of(base, members), threshold, least)
        given = {"lambda": 0.5, "mask_threshold": threshold, "consensus": least}
        torch.testing.assert_close(merge("consensus_ta", base, members, **given), expected)
    single = merge("consensus_ta", base, members[:1], consensus=5, **{"lambda": 1.0})
    assert torch.equal(single, members[0])


def test_lines_on_a_checkpoint(tmp_path, mergekit_yaml):
    model = tiny_llama(num_hidden_layers=3)
    paths = save_family(model, tmp_path, experts=2)
    config = ace_config(paths, merge_method="lines", parameters={"beta": 0.6, "lambda": 0.5})
    merged = state(type(model), mergekit_yaml(config))[1]
    base, *experts = (state(type(model), path)[1] for path in paths)
    for name, tensor in base.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        coefficient = 0.5 * (0.5 + (0.6 * layer / 2 if layer is not None else 0))
        expected = tensor + coefficient * sum(expert[name] - tensor for expert in experts)
        torch.testing.assert_close(merged[name], expected)


def test_lines_in_memory():
    models = {n: {"h.1.w": torch.randn(3, 3)} for n in ("base", "a", "b")}
    merged = merge_state_dicts(models, "lines", base="base", parameters={"layers": 3, "beta": 0.2})
    delta = models["a"]["h.1.w"] + models["b"]["h.1.w"] - 2 * models["base"]["h.1.w"]
    torch.testing.assert_close(merged["h.1.w"], models["base"]["h.1.w"] + 0.6 * delta)


KINDS: dict[str, Kind] = {"regmean": "covariance", "fisher": "fisher"}
NAIVE = {"regmean": naive.naive_regmean, "fisher": naive.naive_fisher}
both = pytest.mark.parametrize("method", KINDS)


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
    merged = merge("regmean", base, experts, statistics=path, **given)
    check("regmean", merged, [base, *experts], covariances, scale=scale, **options)
    stored = base.T, [expert.T for expert in experts]
    turned = merge("regmean", *stored, statistics=path, layout="transposed", **given)
    torch.testing.assert_close(turned.T, merged)


@pytest.mark.parametrize("shape", [(10, 8), (7,), (3, 2, 4), ()])
@pytest.mark.parametrize(("scale", "floor"), [(1.0, 1e-6), (0.7, 0.5)])
def test_fisher(rng, tmp_path, shape, scale, floor):
    base = torch.randn(shape, generator=rng)
    experts = [base + 0.1 * torch.randn(shape, generator=rng) for _ in range(3)]
    fisher = measurements(rng, "fisher", 3, shape)
    path, weights = written(tmp_path, "fisher", fisher), [1.0, 2.0, 0.5]
    given = {"weight": dict(enumerate(weights, 1)), "lambda": scale, "fisher_floor": floor}
    merged = merge("fisher", base, experts, statistics=path, **given)
    check("fisher", merged, [base, *experts], fisher, weights, scale, floor=floor)


@both
def test_weights_and_experts_that_did_not_change_a_tensor(rng, tmp_path, method):
    base, (one, two) = family(rng, 10, 8, 2)
    measured, same = measurements(rng, method, 3), base.clone()
    known = {"statistics": written(tmp_path, method, measured)}
    assert torch.equal(merge(method, base, [same, same], **known), base)
    assert torch.equal(merge(method, base, [one, two], weight={1: 1.0, 2: 0.0}, **known), one)
    weight = {1: 1.0, 2: 1.0, 3: 3.0}
    merged = merge(method, base, [one, same, two], weight=weight, **known)
    check(method, merged, [base, one, two], measured[::2], [1.0, 3.0])


@both
def test_where_nothing_was_measured_is_the_mean(rng, tmp_path, method):
    base, experts = family(rng, 10, 8, 2)
    path = written(tmp_path, method, measurements(rng, method, 2), ("v",))
    expected, given = naive_mean(base, experts), {"name": "v", "statistics": path}
    assert task_vector_error(merge(method, base, experts, **given), expected, base) <= 1e-5


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
    merged = merge(method, base, experts, statistics=written(tmp_path, method, measured))
    mean = naive_mean(base, experts).float()
    silent = (slice(None), 3) if method == "regmean" else 3
    torch.testing.assert_close(merged[silent], mean[silent])


def test_an_expert_whose_samples_never_came_there(rng, tmp_path):
    base, experts = family(rng, 10, 8, 3)
    covariances = measurements(rng, "regmean", 3)
    covariances[1] = torch.zeros(8, 8)
    path = written(tmp_path, "regmean", covariances)
    merged = merge("regmean", base, experts, statistics=path)
    check("regmean", merged, [base, *experts[::2]], covariances[::2], [1.0, 1.0])
