# SPDX-License-Identifier: Apache-2.0
"""The rows of the table: merge methods at their published defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evidence.overlaps import OVERLAPS
from evidence.studies import STUDIES

# W0 + λ (merged − W0), the same values for every method.
SCALES = (0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
# Eight decades for `ace`, and for `ace_relative`, whose ε counts in mean eigenvalues.
ACE_EPSILONS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
RELATIVE_EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0)
NEAR_EPSILONS = (1e-2, 3e-2, 1e-1)
# Where `ace` takes its heterogeneous branch; the first of `gamma` is the paper's.
THRESHOLDS = {"gamma": (0.3, 0.03, 1.0, 3.0), "log_variance": (0.1, 0.3, 1.0, 3.0)}
# The paper's range of `rank_fraction`.
RANK_FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
# What the paper chooses (GPT-2, RoBERTa, the others) and what its implementation has.
PUBLISHED_EPSILONS = (1e-5, 2e-4, 1e-2, 4e-2)
# Groups of rows with data, and of those that stand beside them.
DATA_GROUPS = ("learned", "samples", "words", "generalisation", "regularisation")


@dataclass(frozen=True)
class Row:
    """One method with its parameters.

    Attributes:
        name: in the table.
        method: `merge_method`.
        parameters: of it; those of experts are the same for all of them.
        published: λ of the published defaults; with it the row scales the merged task vector.
        with_base: whether the base is one of the inputs.
        origin: parameters of the merge that λ = 0 stands for; None: the base itself.
        group: of rows that are compared by themselves; "table" for the main one, where λ is tuned.
        study: one of `studies.STUDIES` or `overlaps.OVERLAPS`, in the place of the method's rule
            for matrices.
        tables: whether the method may read embeddings as tables of rows.
        learn: settings of a training whose coefficients the method takes, `samples` per expert
            among them, `rehearsed` ones of the base, and how many `words` they ask; None for a
            method without data.
    """

    name: str
    method: str
    parameters: dict[str, Any] = field(default_factory=dict)
    published: float = 1.0
    with_base: bool = True
    origin: dict[str, Any] | None = None
    group: str = "table"
    study: str | None = None
    tables: bool = True
    learn: dict[str, Any] | None = None

    @property
    def with_data(self) -> bool:
        """Whether it is scored by words that samples ask and by others, or stands beside such."""
        return self.group in DATA_GROUPS


def ace_rows() -> list[Row]:
    """Return `ace` with the paper's ε, and the rows of its ablation at the default one."""
    off = {"spectral_refinement": "never"}
    rows = [Row(f"ace, ε = {e:g}", "ace", {"epsilon": e}) for e in PUBLISHED_EPSILONS]
    rows += [
        Row(
            "ace E1 (ridge only)",
            "ace",
            {"adaptive_normalization": "never", "structural_prior": False, **off},
        ),
        Row("ace E2 (+ normalisation)", "ace", {"structural_prior": False, **off}),
        Row("ace E3 (+ prior)", "ace", off),
    ]
    return rows


TABLE = [
    Row("linear (mean)", "linear", {"weight": 1.0}, with_base=False),
    Row("task_arithmetic", "task_arithmetic", {"weight": 1.0}, published=0.4),
    Row("ties", "ties", {"weight": 1.0, "density": 0.2}),
    Row("dare_ties", "dare_ties", {"weight": 1.0, "density": 0.3}),
    Row("sce", "sce", {"select_topk": 0.1}),
    Row("karcher", "karcher", with_base=False),
    Row("model_stock", "model_stock"),
    Row("tsv_m", "tsv_m"),
    Row("iso_c", "iso_c"),
    Row("iso_cts", "iso_cts"),
    Row("wudi (Adam)", "wudi"),
    Row("wudi (exact)", "wudi", {"solver": "exact"}),
    Row("cart", "cart", origin={"lambda": 0.0}),
    Row("consensus_ta", "consensus_ta", {"lambda": 1.0}, published=0.4),
    Row("lines", "lines"),
    *ace_rows(),
    Row("ace_relative", "ace_relative"),
]


def trained(samples: int, rate: float, **settings: Any) -> dict[str, Any]:
    """Return `learn` of a row: a hundred steps, as many rehearsed samples as each expert has.

    Args:
        samples: per expert, those included that are held out.
        rate: of Adam, falling to zero.
        settings: of `train.yml`; its `training` changes what stands here.
    """
    training = {
        "epochs": 100,
        "max_steps": 100,
        "evaluate_every": 10,
        "learning_rate": rate,
        "scheduler": {"kind": "linear"},
        **settings.pop("training", {}),
    }
    return {"samples": samples, "rehearsed": samples, "training": training, **settings}


# Per method: merge_method, learning rate, what `train.yml` says else.
LEARNERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "statsmerging": ("statsmerging", 1e-3, {}),
    "ace + direct": ("ace", 0.1, {"basis": "ace", "learner": {"input": "direct"}}),
    "ace_relative + direct": (
        "ace_relative", 0.1, {"basis": "ace_relative", "learner": {"input": "direct"}},
    ),
    "ace_relative + shared": (
        "ace_relative", 3e-2, {"basis": "ace_relative", "learner": {"input": "shared"}},
    ),
    "ace_relative + concatenated": ("ace_relative", 1e-3, {"basis": "ace_relative"}),
}  # fmt: skip
SAMPLES = 128


def learned(name: str, samples: int, group: str = "learned", words: int | None = None) -> Row:
    """Return a row with coefficients by one of `LEARNERS`, from samples that ask so many words."""
    method, rate, settings = LEARNERS[name]
    title = f"{name}, {f'{words} words' if words else f'{samples} samples'}"
    learn = trained(samples, rate, **settings) | ({"words": words} if words else {})
    return Row(title, method, group=group, learn=learn)


LEARNED = [
    *(Row(f"{name}, no data", name, group="learned") for name in ("ace", "ace_relative")),
    *(learned(name, SAMPLES) for name in LEARNERS),
]


def adamerging(name: str, **settings: Any) -> Row:
    """Return AdaMerging as published: 500 steps of sixteen samples, nothing rehearsed.

    A coefficient is never below 0. The published implementation stops it at 1, too, above which it
    hardly comes in so many steps (1.002 was the largest on the images).
    """
    training = {
        "max_steps": 500,
        "evaluate_every": 500,
        "epochs": 500,
        "batch_size": 16,
        "scheduler": {"kind": "step", "step": 500},
    }
    learner = {"input": "direct", "activation": "relu"}
    learn = trained(SAMPLES, 1e-3, training=training, loss="entropy", learner=learner, **settings)
    title = f"AdaMerging{name}, {SAMPLES} samples"
    return Row(title, "statsmerging", group="learned", learn=learn | {"rehearsed": 0})


ENTROPY = [
    adamerging(", task-wise", granularity="task"),
    adamerging(", layer-wise"),
    adamerging("++, task-wise", granularity="task", basis="ties"),
    adamerging("++, layer-wise", basis="ties"),
]

# Accuracy against the number of samples, and of different words in 128 of them.
SAMPLED = [
    learned(name, samples, "samples")
    for name in ("statsmerging", "ace_relative + direct", "ace_relative + shared")
    for samples in (16, 32, 64, 256, 512)
] + [learned("ace_relative + direct", SAMPLES, "words", words) for words in (6, 12, 18)]


def generalised(name: str, **settings: Any) -> Row:
    """Return the row `ace_relative + direct` with a change that may help with unseen words."""
    method, rate, own = LEARNERS["ace_relative + direct"]
    learn = trained(SAMPLES, settings.pop("rate", rate), **own, **settings)
    return Row(f"for unseen words: {name}", method, group="generalisation", learn=learn)


GENERALISED = [
    *(
        generalised(f"{steps} steps", training={"max_steps": steps, "evaluate_every": 5})
        for steps in (10, 30, 300)
    ),
    generalised("learning rate 0.03", rate=0.03),
    *(generalised(f"penalty {p:g}", training={"penalty": p}) for p in (1.0, 3.0)),
    *(generalised(f"a coefficient per {unit}", granularity=unit) for unit in ("kind", "block")),
    generalised("a coefficient per expert", granularity="task"),
    *(
        generalised(f"per kind, {name}", granularity="kind", **settings)
        for name, settings in (
            ("30 steps", {"training": {"max_steps": 30, "evaluate_every": 5}}),
            ("300 steps", {"training": {"max_steps": 300}}),
            ("learning rate 0.03", {"rate": 0.03}),
            ("penalty 0.3", {"training": {"penalty": 0.3}}),
            ("soft labels", {"labels": "soft"}),
            ("stopped by other words", {"validation": 6}),
        )
    ),
    generalised("soft labels", labels="soft"),
    generalised("two samples a step", training={"batch_size": 2}),
    generalised("stopped by other words", validation=6),
]


def regularised(name: str, **settings: Any) -> Row:
    """Return `ace_relative + direct` without rehearsal and penalty, unless they are given."""
    method, rate, own = LEARNERS["ace_relative + direct"]
    training = {"penalty": 0.0, **settings.pop("training", {})}
    learn = {**trained(SAMPLES, rate, training=training, **own), "rehearsed": 0, **settings}
    return Row(f"direct: {name}", method, group="regularisation", learn=learn)


REGULARISED = [
    regularised("nothing", training={"evaluate_every": 100}),
    regularised("early stopping"),
    regularised("a coefficient per block", granularity="block"),
    *(regularised(f"penalty {p:g}", training={"penalty": p}) for p in (0.1, 0.3, 1.0, 3.0)),
    regularised("16 rehearsed", rehearsed=16),
    *(
        regularised(f"128 rehearsed, weight {w:g}", rehearsed=128, training={"rehearsal_weight": w})
        for w in (0.25, 1.0)
    ),
    regularised("128 rehearsed, penalty 0.3", rehearsed=128, training={"penalty": 0.3}),
]

STUDIED = [
    Row("embeddings as matrices", "ace_relative", group="study", study="fixed", tables=False),
    *(Row(name, "ace_relative", group="study", study=name) for name in STUDIES),
    *(Row(name, "ace_relative", group="old skills", study=name) for name in OVERLAPS),
]

SWEEPS = [
    *(Row(f"ace at ε = {e:g}", "ace", {"epsilon": e}, group="ace over ε") for e in ACE_EPSILONS),
    *(
        Row(
            f"ace_relative{suffix} at ε = {e:g}",
            "ace_relative",
            {"epsilon": e, **parameters},
            group=f"ace_relative{suffix} over ε",
        )
        for suffix, parameters, epsilons in (
            ("", {}, RELATIVE_EPSILONS),
            (", centred", {"centred": True}, NEAR_EPSILONS),
            (", prior", {"structural_prior": True}, NEAR_EPSILONS),
        )
        for e in epsilons
    ),
    *(
        Row(
            f"{statistic} above {threshold:g}, ε = {e:g}",
            "ace",
            {"epsilon": e, "heterogeneity": statistic, "heterogeneity_threshold": threshold},
            group=f"ace by thresholds, ε = {e:g}",
        )
        for e in (1e-5, 1e-2)
        for statistic, thresholds in THRESHOLDS.items()
        for threshold in thresholds
    ),
    *(
        Row(
            f"heterogeneous: {always}, ε = {e:g}",
            "ace",
            {"epsilon": e, "adaptive_normalization": always, "spectral_refinement": always},
            group=f"ace by thresholds, ε = {e:g}",
        )
        for e in (1e-5, 1e-2)
        for always in ("never", "always")
    ),
    *(
        Row(
            f"refinement_mean {mean}, ε = {e:g}",
            "ace",
            {"refinement_mean": mean, "epsilon": e, "heterogeneity": "log_variance"},
            group="ace by the mean of its refinement",
        )
        for mean in ("ridged", "plain")
        for e in ACE_EPSILONS[3:]
    ),
    *(
        Row(
            f"rank_fraction {share:g}, ε = {e:g}",
            "ace",
            {
                "rank_fraction": share,
                "epsilon": e,
                "adaptive_normalization": "always",
                "spectral_refinement": "always",
            },
            group=f"ace by rank_fraction, ε = {e:g}",
        )
        for e in (1e-5, 1e-2)
        for share in RANK_FRACTIONS
    ),
]
