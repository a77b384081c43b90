# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace search`: an Optuna study of λ and weights, each trial a merge in memory."""

from __future__ import annotations

import json
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from mergekit_ace.check.loading import merged_model
from mergekit_ace.files import saving
from mergekit_ace.naming import ConfigError
from mergekit_ace.score.config import ScoreConfig, SearchConfig
from mergekit_ace.score.results import Estimate, Losses, aligned, forgot, kept, mean, show_search
from mergekit_ace.score.score import (
    Scoring,
    explained_memory,
    load_scored,
    merge_once,
    sequence_losses,
)
from mergekit_ace.score.space import SearchedMerge
from mergekit_ace.training.models import local_folder, map_weights, model_paths

try:
    import optuna
except ImportError as missing:
    raise ConfigError("`search` needs Optuna: pip install 'mergekit-ace[search]'") from missing

STUDY, LOCK = "study.db", "search.lock"
STARTS = (0.5, 0.7, 0.85, 1.0)  # λ of the first trials
FEWEST = 8  # texts, half of which are for the test
FINALISTS, PLAIN_FINALISTS = 5, 2  # trials that read all validation texts; those of one λ alone


def run_search(
    config: SearchConfig, score: ScoreConfig, out: Path, *, overwrite: bool = False,
    quiet: bool = False,
) -> str:  # fmt: skip
    """Search merges; `out` gets study and best merge. A `ConfigError` names what is wrong."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = _Search(config, score, out, quiet)
    out.mkdir(parents=True, exist_ok=True)
    if {path.name for path in out.iterdir()} - {LOCK} and not (out / STUDY).exists():
        raise ConfigError(f"{out} holds other things than a search; give another folder")
    with warnings.catch_warnings(), explained_memory(score.base_model):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        with ExitStack() as working:
            with FileLock(out / LOCK):
                search.claim(overwrite)
                working.enter_context(saving.locked(search.place_of(search.worker)))
                search.prepare()
            search.run_trials()
            with FileLock(out / LOCK):
                return search.finish()


class _Search:
    def __init__(self, config: SearchConfig, score: ScoreConfig, out: Path, quiet: bool):
        self.config, self.score, self.out, self.quiet = config, score, out, quiet
        self.trust = score.trust_remote_code
        self.worker = uuid.uuid4().hex  # its lock tells other processes that this one lives
        merges = (SearchedMerge(Path(p), config.search, score.base_model) for p in config.merge)
        self.merges = {merge.name: merge for merge in merges}
        few = slice(0, 2 * config.sequences, 2)  # what trials, finalists and the test read
        self.parts = {"few": few, "validation": slice(0, None, 2), "test": slice(1, None, 2)}
        plain = [name for name, merge in self.merges.items() if not merge.experts]
        if config.search.weight is not None and plain:
            said = "weights can be searched of ace, ace_plus and task_arithmetic, not of"
            if len(plain) == len(self.merges):
                raise ConfigError(f"{said} {plain[0]}; leave out `weight` and `by: expert`")
            print(f"{said} {', '.join(plain)}, of which only λ is")
        if unknown := sorted(config.aims.keys() - {"kept", *score.tasks}):
            said = f"`aim` has {unknown[0]}, which is neither `kept` nor a task of {config.score}"
            raise ConfigError(said)

    def claim(self, overwrite: bool) -> None:
        """Open the study, and find that it is one of the same settings and files."""
        experts = self.score.models
        data = [one.path for one in (*(e.data for e in experts), self.score.keep) if one]
        models = {self.score.base_model, *(expert.model for expert in experts)}
        merged = [name for merge in self.merges.values() for name in merge.inputs]
        files = [*self.config.merge, *model_paths(models), *merged, *data]
        if overwrite:
            saving.check_apart(files, [self.out])
            for place in filter(Path.is_dir, self.place_of("").glob("*")):
                with saving.locked(place):  # else its process is at work here
                    pass
            for path in self.out.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        directions: Any = ["maximize"] + ["minimize"] * (self.config.aim == "frontier")
        self.study: Any = optuna.create_study(
            storage=f"sqlite:///{self.out.resolve() / STUDY}", study_name="search",
            directions=directions, load_if_exists=True,
        )  # fmt: skip
        identity = {
            "search": self.config.model_dump(mode="json", exclude={"trials", "score"}),
            "score": self.score.model_dump(mode="json", exclude={"merges"}),
            "files": saving.file_states(files),
        }
        known = self.study.user_attrs.get("identity", identity)
        if changed := saving.differences(known, identity):
            raise saving.occupied(self.out, "another study", changed)
        self.study.set_user_attr("identity", identity)

    def prepare(self) -> None:
        """Score base and experts, make the merges at λ = 1, and load what trials need."""
        self.scoring = Scoring(self.score, self.out / "scores", quiet=self.quiet)
        self.scoring.measure(())
        for merge in self.merges.values():
            merge.make(self.out / "merges", trust=self.trust, quiet=self.quiet)
        folder = local_folder(self.score.base_model, self.out, self.trust)
        self.module = load_scored(merged_model(Path(folder)), self.score)
        names = [name for name, _ in self.module.named_parameters()]
        weights = map_weights(self.module, names, folder, self.out / "base.safetensors")
        for merge in self.merges.values():
            merge.load(self.module, weights, self.score)
        self.ranges = {name: one for merge in self.merges.values()
                       for name, one in merge.ranges.items()}  # fmt: skip
        for exam in self.scoring.exams:
            if (count := len(self.scoring.samples(exam, self.module))) < FEWEST:
                raise ConfigError(f"{exam} has {count} texts; a search needs {FEWEST}")
        *experts, keep = self.scoring.exams
        gaining = [exam for exam in experts if self._gains(exam)]
        if "kept" in self.config.aims and not gaining:
            said = "no expert is better than the base on its validation texts; give other texts"
            raise ConfigError(said)
        self.exams = [*gaining, keep]  # that count
        self.questions = {
            task: range(self.scoring.harness.count(task))[: expert.limit]
            for expert in self.score.models
            for task in expert.tasks
            if task in self.config.aims
        }

    def _gains(self, name: str) -> bool:
        base, expert = (self._losses(name, model, "validation") for model in ("base", name))
        return kept(base, expert, expert) is not None

    def _losses(self, exam: str, model: str, part: str) -> Losses:
        return self.scoring.measured[exam][model]["losses"][self.parts[part]]

    def measure(self, part: str) -> dict[str, Any]:
        """Measure the model in memory on a part of the texts: its aim, and what it forgets."""
        found, shares = {}, []
        for name in self.exams:
            samples = self.scoring.samples(name, self.module)[self.parts[part]]
            losses = sequence_losses(self.module, samples, title=name, quiet=True)
            base = self._losses(name, "base", part)
            if name == "keep":
                found["forgot"] = forgot(base, losses)
            else:
                shares.append(kept(base, self._losses(name, name, part), losses, always=True))
        if shares:
            found["kept"] = mean(shares)
        for task, numbers in self.questions.items():
            one = self.scoring.harness.measure(
                self.module, self.scoring.tokenizer, task, questions=numbers[part == "test" :: 2]
            )
            found[task] = Estimate(one["value"], one["error"])
        total = sum(weight * found[name].value for name, weight in self.config.aims.items())
        return {**found, "aim": total / sum(self.config.aims.values())}

    def run_trials(self) -> None:
        """Run trials until all processes together have run as many as wanted."""
        bar = tqdm(desc="trials", total=self.config.trials, unit="trial", disable=self.quiet)
        with bar:
            while True:
                with FileLock(self.out / LOCK):
                    self._fail_killed()
                    trial = self._ask()
                if trial is not None:
                    self._run(trial)
                elif self._trials("RUNNING"):  # of other processes
                    time.sleep(0.2)
                else:
                    return
                bar.update(len(self._trials("COMPLETE", "PRUNED")) - bar.n)

    def place_of(self, worker: str) -> Path:
        """Return the folder that a process has locked while it is at work on the study."""
        return self.out / "locks" / worker

    def _trials(self, *states: str) -> list[Any]:
        return [one for one in self.study.get_trials(deepcopy=False) if one.state.name in states]

    def _fail_killed(self) -> None:
        """Give up the trials whose processes were killed, so that others take their places."""
        for one in self._trials("RUNNING"):
            worker = one.user_attrs.get("worker", "none")  # if it was killed as it asked
            with suppress(ConfigError), saving.locked(self.place_of(worker)):
                self.study.tell(one.number, state=optuna.trial.TrialState.FAIL)

    def _ask(self) -> Any:
        """Return a new trial with its parameters if one is wanted, at first plain merges."""
        begun = self._trials("COMPLETE", "PRUNED", "RUNNING")
        if len(begun) >= self.config.trials:
            return None
        tried = [one.params.items() for one in begun]
        weights = [name for name in self.ranges if name.startswith("weight.")]
        low, high = self.config.search.scale
        starts: list[dict[str, Any]] = [
            {"merge": merge, **dict.fromkeys(self.ranges, scale), **dict.fromkeys(weights, 1.0)}
            for merge in self.merges
            for scale in sorted({min(max(start, low), high) for start in STARTS})
        ]
        left = [one for one in starts if not any(one.items() <= items for items in tried)]
        if left:
            self.study.enqueue_trial(left[0])
        # A seed of each trial's own: a study that was stopped goes on alike.
        seed, samplers = self.config.seed + len(begun), optuna.samplers
        self.study.sampler = samplers.GPSampler(
            seed=seed, n_startup_trials=len(starts), deterministic_objective=True
        )
        *earlier, last = [None, *map(self._key, self._trials("COMPLETE", "PRUNED"))]
        if last in earlier:  # the sampler stays at a bound, once that is the best
            self.study.sampler = samplers.RandomSampler(seed)
        trial = self.study.ask()
        trial.set_user_attr("worker", self.worker)
        trial.suggest_categorical("merge", [*self.merges])
        for name, (low, high) in self.ranges.items():  # of all merges: the sampler models these
            trial.suggest_float(name, low, high, log=name in weights)
        return trial

    def _run(self, trial: Any) -> None:
        known = {self._key(one): one.user_attrs["found"] for one in self._trials("COMPLETE")}
        try:
            found = known.get(self._key(trial))
            if found is None:
                self._set(trial.params)
                found = self.measure("few")
        except ConfigError:  # NaN or Inf
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        trial.set_user_attr("found", found)
        if self.config.aim == "frontier":
            self.study.tell(trial, [found["aim"], found["forgot"][0]])
        else:
            trial.set_constraint("forgot", found["forgot"][0] - self.config.budget)
            self.study.tell(trial, found["aim"])

    def _set(self, parameters: Mapping[str, Any]) -> None:
        self.merges[parameters["merge"]].set(self._rounded(parameters))

    def _rounded(self, parameters: Mapping[str, Any]) -> dict[str, float]:
        """Return λ and weights of a merge with as many digits as anybody reads."""
        own = self.merges[parameters["merge"]].ranges
        return {name: round(parameters[name], 4) for name in own}

    def _key(self, trial: Any) -> tuple[Any, ...]:
        """Return what trials of one merge have in common."""
        return trial.params["merge"], *self._rounded(trial.params).items()

    def _is_plain(self, parameters: Mapping[str, Any]) -> bool:
        """Tell whether a merge has one λ for all tensors, and no weights."""
        own = self._rounded(parameters)
        weights = [own.pop(name) for name in [*own] if name.startswith("weight.")]
        return len({*own.values()}) == 1 and {*weights} <= {1.0}

    def finish(self) -> str:
        """Let the best trials read all validation texts, and test and write the best of them."""
        trials = self._trials("COMPLETE")
        if not trials:
            raise ConfigError("every merge answers NaN or Inf; lower the range of `lambda`")
        merges = [*{self._key(one): one for one in reversed(trials)}.values()][::-1]
        ranked = sorted(merges, key=lambda one: self._rank(one.user_attrs["found"]), reverse=True)
        plain = [one for one in ranked if self._is_plain(one.params)][:PLAIN_FINALISTS]
        results = {}
        for name, among in (("best found", [*ranked[:FINALISTS], *plain]), ("best λ alone", plain)):
            if not among:
                continue
            best = max(among, key=lambda one: self._rank(self._measured(one, "validation")))
            results[name] = {
                "trial": best.number,
                "merge": best.params["merge"],
                "parameters": self._rounded(best.params),
                "validation": self._measured(best, "validation"),
            }
            if among is plain:
                results[name]["test"] = self._measured(best, "test")
        self._write_model(results["best found"])
        return self._write_results(results, trials)

    def _rank(self, found: Mapping[str, Any]) -> tuple[bool, float]:
        """Return what is larger for a better merge: within the budget the aim, else forgetting."""
        lost = found["forgot"][0]
        within = lost <= self.config.budget
        return within, found["aim"] if within else -lost

    def _measured(self, trial: Any, part: str) -> dict[str, Any]:
        """Return what a trial's merge has on a part of the texts, measured once per study."""
        key = f"trial {trial.number}, {part}"
        if key not in self.study.user_attrs:
            self._set(trial.params)
            self.study.set_user_attr(key, self.measure(part))
        return self.study.user_attrs[key]

    def _write_model(self, best: dict[str, Any]) -> None:
        """Write `merge.yml`, merge by it, and test the model that comes out."""
        path = self.out / "merge.yml"
        values = ", ".join(f"{name} {value:g}" for name, value in best["parameters"].items())
        comment = f"Trial {best['trial']} of a search: {values}"
        if not path.exists() or not path.read_text("utf-8").startswith(f"# {comment}\n"):
            self.merges[best["merge"]].write(best["parameters"], self.out, comment)
        del self.module
        self.merges.clear()  # which hold it, too
        model = merge_once(path, self.out / "model", trust=self.trust, quiet=self.quiet)
        self.module = load_scored(merged_model(Path(model)), self.score)
        best["test"] = self.measure("test")

    def _write_results(self, results: Mapping[str, Any], trials: Sequence[Any]) -> str:
        """Write `search.json` and `search.html`, and return the table."""
        figures, budget = [*self.config.aims, "forgot"], self.config.budget
        rows: list[list[Any]] = [["", "merge", "texts", *figures]]
        for name, found in results.items():
            for part in ("validation", "test"):
                *aims, lost = (Estimate(*found[part][one]) for one in figures)
                rows.append([name, found["merge"], part, *aims, lost.signed])
        best = results["best found"]
        lines = [aligned(rows), "", f"trial {best['trial']} of {len(trials)}:"]
        lines += [f"  {name}: {value:g}" for name, value in best["parameters"].items()]
        lines += ["", "The test texts took no part in the search: believe their figures."]
        lines += [
            f"{exam} is no better than the base on its texts, and does not count."
            for exam in self.scoring.exams
            if exam not in self.exams
        ]
        if best["validation"]["forgot"][0] > budget:
            lines += [f"Every merge forgets more than {budget:g} nats (`budget`); lower `lambda`."]
        frontier = self.study.best_trials if self.config.aim == "frontier" else ()
        front = {one.number for one in frontier}
        points = [
            {
                "trial": one.number,
                "merge": one.params["merge"],
                "aim": one.user_attrs["found"]["aim"],
                "forgot": one.user_attrs["found"]["forgot"][0],
                "frontier": one.number in front,
            }
            for one in trials
        ]
        content, text = {**results, "budget": budget, "trials": points}, "\n".join(lines)
        saving.write_text(self.out / "search.json", json.dumps(content, indent=1) + "\n")
        show_search(points, budget, text, self.out / "search.html")
        return text
