"""Build docs/study.md from the committed results: verdicts, figures, pictures.

    python docs/study.py runs/reproduce/study/results    take results over, then build
    python docs/study.py                                 build from results/study alone

The claims and the results that decide them are in docs/claims.yaml. The page says where things go:

    <!-- verdicts -->...<!-- end -->                the table of verdicts
    <!-- state -->...<!-- end -->                   which systems have results
    <!-- gains CAR -->...<!-- end -->               gain over token frequencies of each system
    <!-- difference bart-modern - tracformer-car: spans-12 -->...<!-- end -->

What is taken over keeps the sums of each window, rounded, which paired intervals need; texts are
left out.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tracformer.evaluation.result_files import Result, read_results
from tracformer.files import write_atomically
from tracformer.model.base import BOUND, EXACT, MARGINAL
from tracformer.report import figures as plots
from tracformer.report import write_report
from tracformer.report.claims import NOT_RUN, Judge, Question, Verdict, read_claims
from tracformer.report.collect import SEED, choose, over_seeds
from tracformer.report.tables import NEITHER, Cell, Line, Table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "study.md"
CLAIMS = ROOT / "docs" / "claims.yaml"
RESULTS = ROOT / "results" / "study"
PICTURES = ROOT / "docs" / "pictures"
MARK = re.compile(
    r"(?P<head><!-- (?P<what>[a-z]+)(?: (?P<of>[^>]*?))? -->\n?).*?(?P<tail><!-- end -->)", re.S
)
TEXTS = ("fills", "text")  # parts of a result's details that hold evaluation text
DECIMALS = 4
MOST_ROWS = 8  # of the tables on the page, except the verdicts
TRAINED = "spans-12"  # the question whose contexts are those of training
Models = dict[str, list[Result]]


def take_over(source: Path, target: Path = RESULTS) -> None:
    """Add results to those in `target`; of several for one question the newest stays."""
    results = choose([*(read_results(target) if target.exists() else ()), *read_results(source)])
    target.mkdir(parents=True, exist_ok=True)
    kept = {compact(result).save(target) for result in results}
    for path in set(target.glob("*.json")) - kept:
        path.unlink()


def compact(result: Result) -> Result:
    """Return a result without texts, and with rounded sums."""
    details = {key: rounded(value) for key, value in result.details.items() if key not in TEXTS}
    return dataclasses.replace(result, details=details)


def rounded(value: Any) -> Any:
    """Return numbers at any depth with `DECIMALS` decimals."""
    if isinstance(value, float):
        return round(value, DECIMALS)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


class Page:
    """The parts of the page, from results."""

    def __init__(self, results: Iterable[Result], claims: Path = CLAIMS) -> None:
        self.claims = read_claims(claims)
        self.judge = Judge(self.claims, results)
        self.makers: dict[str, Callable[[str], str]] = {
            "verdicts": self.verdicts,
            "state": self.state,
            "gains": self.gains,
            "difference": self.difference,
        }

    def render(self, document: str) -> str:
        """Return the document with each of its marked parts made anew."""

        def part(found: re.Match[str]) -> str:
            what, of = found["what"], found["of"] or ""
            if what not in self.makers:
                known = ", ".join(self.makers)
                raise ValueError(f"unknown mark {what!r} in {DOCUMENT.name}; there are {known}")
            return found["head"] + self.makers[what](of) + found["tail"]

        return MARK.sub(part, document)

    def verdicts(self, _: str = "") -> str:
        """Return the table of verdicts."""
        lines = [
            Line(f"{v.claim.place}: {v.claim.text}", "", (v.text, figure_of(v), link_of(v)))
            for v in self.judge.verdicts()
        ]
        columns = ("verdict", "nats per token, 95% interval", "from")
        table = Table("verdicts", "", columns, tuple(lines), NEITHER, head="claim", align="lll")
        return table.to_markdown()

    def state(self, _: str = "") -> str:
        """Return a sentence that says how many systems have results."""
        wanted = {name for c in self.claims.claims for name in (c.better, *c.worse) if name}
        done = sorted(name for name in wanted if self.judge.gain(name) is not None)
        names = ", ".join(f"`{name}`" for name in done) or "none"
        return f"{len(done)} of the {len(wanted)} systems named below have been run: {names}.\n"

    def gains(self, mode: str) -> str:
        """Return a table of gains over token frequencies, best first."""
        kinds = {"CAR": (EXACT, BOUND), "AC": (MARGINAL,)}
        if mode not in kinds:
            raise ValueError(f"gains {mode!r}: it must be one of {', '.join(kinds)}")
        names = [TRAINED, "spans-3", "single"]
        lines = []
        for model in self.models(kinds[mode]):
            cells = tuple(
                self.mean_gain(model, self.claims.questions[name], kinds[mode]) for name in names
            )
            one = self.judge.gain(model)
            if one is not None and all(cells):
                lines.append(Line(f"`{model}`", "", (*cells, Cell(one))))
        lines.sort(key=lambda line: -line.cells[0].value)  # type: ignore[union-attr]
        if not lines:
            return f"({NOT_RUN})\n"
        columns = ("spans of 12", "spans of 3", "single tokens", "one hidden token")
        return Table("gains", "", columns, tuple(lines[:MOST_ROWS]), NEITHER).to_markdown()

    def difference(self, of: str) -> str:
        """Return a paired difference, as in `bart-modern - tracformer-car: spans-12`."""
        found = re.fullmatch(r"(\S+) - (\S+): (\S+)", of)
        if found is None:
            raise ValueError(f"difference {of!r}: write it as WORSE - BETTER: QUESTION")
        worse, better, question = found.groups()
        value, _ = self.judge.difference(better, worse, [self.claims.questions[question]])
        return str(value)

    # ---- what models gain

    def models(self, kinds: Sequence[str]) -> list[str]:
        """Return the models that answer the training question with these kinds of figures."""
        question = self.claims.questions[TRAINED]
        found = [
            SEED.sub("", result.model)
            for result in self.judge.results
            if question.asks(result) and result.rows[0].kind in kinds
        ]
        return [name for name in dict.fromkeys(found) if name != self.claims.baseline]

    def gain_by_ratio(
        self, model: str, question: Question, kinds: Sequence[str]
    ) -> dict[float, Cell]:
        """Return the gain over token frequencies in nats per token, by the ratio of targets."""
        own = self.judge.answers(model, question, kinds)
        floor = self.judge.answers(self.claims.baseline, question)
        if not own or not floor:
            return {}
        base = next(iter(floor.values()))
        found = {}
        for row in base.rows:
            if row.metric == "nll":
                each = [
                    result.find("nll", contexts=row.setting["contexts"]) for result in own.values()
                ]
                cell = over_seeds(each)
                low, high = (
                    row.value - (cell.value if x is None else x) for x in (cell.high, cell.low)
                )
                found[float(row.setting["ratio"])] = Cell(row.value - cell.value, low, high)
        return found

    def mean_gain(self, model: str, question: Question, kinds: Sequence[str]) -> Cell | None:
        """Return the mean gain over all ratios; None if it was not run."""
        gains = [cell.value for cell in self.gain_by_ratio(model, question, kinds).values()]
        return Cell(sum(gains) / len(gains)) if gains else None

    # ---- pictures

    def draw(self, folder: Path = PICTURES) -> list[Path]:
        """Draw the pictures that the results allow; return their files."""
        pages = {
            "study-gains": (self.draw_gains, (10.4, 3.8)),
            "study-curves": (self.draw_curves, (10.4, 3.8)),
            "study-exact": (self.draw_exact, (10.4, 3.8)),
        }
        pyplot, files = plots.pyplot_of(), []
        for name, (draw, size) in pages.items():
            with pyplot.rc_context({**plots.style_of(name), "font.size": 10}):
                figure = pyplot.figure(figsize=size, layout="constrained")
                if draw(figure):
                    files.append(folder / f"{name}.png")
                    plain = {"dpi": 150, "facecolor": "white", "metadata": {"Software": None}}
                    figure.savefig(files[-1], **plain)
                pyplot.close(figure)
        return files

    def draw_gains(self, figure: Any) -> bool:
        """Draw the gain as a share of the best system's, against the ratio of targets."""
        parts = figure.subfigures(1, 2)
        question = self.claims.questions[TRAINED]
        drawn = False
        for part, title, kinds in zip(
            parts, ("CAR", "AC"), ((EXACT, BOUND), (MARGINAL,)), strict=True
        ):
            by_model = {
                name: self.gain_by_ratio(name, question, kinds) for name in self.models(kinds)
            }
            by_model = {name: gains for name, gains in by_model.items() if gains}
            if not by_model:
                continue
            ratios = sorted(next(iter(by_model.values())))
            best = {x: max(gains[x].value for gains in by_model.values()) for x in ratios}
            chosen = sorted(
                by_model, key=lambda name: -by_model[name][ratios[len(ratios) // 2]].value
            )
            lines = []
            for name in chosen[:MOST_ROWS]:
                cells = [by_model[name][x] for x in ratios]
                y, low, high = (
                    tuple(
                        100 * getattr(cell, end) / best[x]
                        for x, cell in zip(ratios, cells, strict=True)
                    )
                    for end in ("value", "low", "high")
                )
                lines.append(plots.Curve(name, "", tuple(ratios), y, low, high))
            numbers = {line.label: index for index, line in enumerate(lines)}
            plots.curves(lines, "share of tokens to predict", "% of the best gain", numbers)(part)
            part.suptitle(title, fontsize=10)
            drawn = True
        return drawn

    def draw_curves(self, figure: Any) -> bool:
        """Draw held-out loss against tokens and against operations, with the frequencies' loss."""
        curves = {
            SEED.sub("", result.model): result
            for result in self.judge.results
            if result.task == "training" and result.options["length"] == 128
        }
        floor = curves.pop(self.claims.baseline, None)
        if not curves or floor is None:
            return False
        flops = {
            SEED.sub("", result.model): result.find("flops_per_token").value
            for result in self.judge.results
            if result.task == "sizes"
            and any(row.metric == "flops_per_token" for row in result.rows)
        }
        contexts = floor.rows[0].setting["contexts"]
        level = math.log(
            [row for row in floor.rows if row.setting["contexts"] == contexts][-1].value
        )
        panels = [("million tokens", 1e6, None), ("teraFLOP", 1e12, flops)]
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (name, unit, scale) in zip(axes, panels, strict=True):
            for index, (model, result) in enumerate(sorted(curves.items())):
                rows = [row for row in result.rows if row.setting["contexts"] == contexts]
                if not rows or (scale is not None and model not in scale):
                    continue
                tokens = [result.details["tokens"][str(row.setting["step"])] for row in rows]
                x = [count * (scale[model] if scale else 1) / unit for count in tokens]
                colour = plots.COLOURS[index % len(plots.COLOURS)]
                style = "-" if rows[0].kind == EXACT else "--"
                axis.plot(
                    x, [math.log(row.value) for row in rows], style, color=colour, label=model
                )
            axis.axhline(level, color="gray", linewidth=1)
            axis.set_xlabel(name)
        axes[0].set_ylabel("held-out nats per token")
        axes[0].legend(fontsize=6, ncols=2)
        return True

    def draw_exact(self, figure: Any) -> bool:
        """Draw the KL divergence from the truth, by pattern of hidden symbols."""
        found: dict[str, Models] = {}
        for result in self.judge.results:
            if result.task == "exact" and result.rows[0].metric == "kl":
                models = found.setdefault(str(result.options["source"]), {})
                models.setdefault(SEED.sub("", result.model), []).append(result)
        if not found:
            return False
        axes = figure.subplots(1, len(found), squeeze=False)[0]
        for axis, (source, models) in zip(axes, sorted(found.items()), strict=True):
            for index, (model, results) in enumerate(sorted(models.items())):
                rows = [row for row in results[0].rows if row.metric == "kl"]
                colour = plots.COLOURS[index % len(plots.COLOURS)]
                marker = plots.MARKERS[index % len(plots.MARKERS)]
                values = [row.value for row in rows]
                axis.plot(range(len(rows)), values, marker, color=colour, label=model)
            axis.set_xticks(range(len(rows)), [str(row.setting["pattern"]) for row in rows])
            axis.tick_params(axis="x", rotation=60)
            axis.set_yscale("log")
            axis.set_title(source, fontsize=10)
            axis.legend(fontsize=6, ncols=2)
        axes[0].set_ylabel("KL from the truth, nats per symbol")
        return True


def figure_of(verdict: Verdict) -> str:
    """Return the figure of a verdict, with the model that was compared."""
    if verdict.difference is None:
        return ""
    seeds = f", {verdict.difference.seeds} seeds" if verdict.difference.seeds > 1 else ""
    name = f" ({verdict.claim.metric})" if verdict.claim.metric else ""
    return f"{verdict.difference}{name}{seeds}"


def link_of(verdict: Verdict) -> str:
    """Return links to the result files of a verdict, one for each model."""
    first = {SEED.sub("", result.model): result for result in reversed(verdict.results)}
    return ", ".join(
        f"[{name}](../results/study/{result.file_name})" for name, result in sorted(first.items())
    )


def build() -> None:
    """Write the page, its pictures and the report of all results."""
    page = Page(read_results(RESULTS) if RESULTS.exists() else ())
    write_atomically(DOCUMENT, page.render(DOCUMENT.read_text()))
    page.draw()


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, help="folder of results to take over")
    parser.add_argument("--report", type=Path, help="also write the full report into this folder")
    arguments = parser.parse_args()
    if arguments.results is not None:
        take_over(arguments.results)
    build()
    if arguments.report is not None:
        about = yaml.safe_load(
            (ROOT / "src/tracformer/reproduce/experiments/scales/study.yaml").read_text()
        )["about"]
        write_report([RESULTS], arguments.report, title="The study", about=[about])


if __name__ == "__main__":
    main()
