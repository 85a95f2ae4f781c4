"""Score mutants of a protein: log p(mutant residues | rest) minus that of the wild type.

    tracformer mutants -m pdz --wild-type SEQUENCE --first 311 --all-singles --out scores.csv
    tracformer mutants -m pdz --wild-type wild.fasta --mutants dms.csv --heat-map map.png
    tracformer mutants -m pdz --wild-type DLG4_RAT --family PF00595.fasta --mutants dms.csv --rivals
    tracformer mutants -m pdz --wild-type wild.fasta --file doubles.csv --out doubles --workers 4

The table of mutants is a CSV file in ProteinGym's convention: a column `mutant` such as `A24G`, or
`A24G:C30D` for several sites. If it has a column of measured values, the agreement with them is
printed. `log_ratio` is the exact joint of all mutated residues; `sum_of_singles` adds up the single
mutations, which ignores that they interact. Several models (-m A -m B) are averaged.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tracformer.cli import Command, output
from tracformer.cli import arguments as shared
from tracformer.options import flag_of

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel
    from tracformer.proteins.mutants import Mutant, MutantScore
    from tracformer.proteins.wild_type import WildType

DESIGN_DESCRIPTION = """Redesign regions of a protein: distinct samples, the most probable first.

    tracformer design -m pdz --wild-type SEQUENCE --region 24-31 -n 10 --out designs.fasta
    tracformer design -m pdz --wild-type wild.fasta --region 24-31 --region 40-44 \\
        --allow 25=AVIL --forbid 30=C --keep 27-28 --max-changes 4

The log-probability of a design is the model's own log p(region | rest); it is in the header of each
record.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer mutants`."""
    _add_wild_type(parser)
    parser.add_argument("--mutants", metavar="CSV", help="table with a column 'mutant'")
    parser.add_argument(
        "--all-singles", action="store_true", help="score every substitution of one residue"
    )
    parser.add_argument(
        "--score-column",
        default="DMS_score",
        metavar="NAME",
        help="column of measured values (default: DMS_score)",
    )
    parser.add_argument(
        "--mode",
        default="car",
        choices=("car", "ac"),
        help="car: exact joint; ac: sum of marginals (default: car)",
    )
    parser.add_argument(
        "--file", metavar="FILE", help="large table of mutants; its scores go to files in --out"
    )
    parser.add_argument(
        "--out", metavar="CSV|FOLDER", help="write the scores to this file; with --file, folder"
    )
    parser.add_argument(
        "--heat-map", metavar="FILE", help="draw single mutants to a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--rivals",
        action="store_true",
        help=(
            "compare with a profile, a profile HMM and arDCA, fitted to --family (minutes), and "
            "with the model's other scores"
        ),
    )
    shared.add_job(parser, "mutant")


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer mutants`."""
    if arguments.file is not None:
        return _run_job(arguments)
    if wrong := [
        name for name in shared.JOB_FLAGS if getattr(arguments, name) not in (None, False)
    ]:
        raise ValueError(f"{flag_of(wrong[0])} is for large tables: give one with --file FILE")
    if bool(arguments.mutants) == arguments.all_singles:
        raise ValueError("give either --mutants CSV or --all-singles")
    if arguments.rivals and not arguments.family:
        raise ValueError("--rivals needs --family, the alignment that they are fitted to")
    from tracformer.proteins import mutants as table
    from tracformer.proteins.mutants import check_path, draw_heat_map

    if arguments.heat_map:
        check_path(arguments.heat_map)
    models = [
        shared.open_model(name, verify=arguments.verify)
        for name in arguments.model or [shared.default_model()]
    ]
    wild = _wild_type(arguments, models[0])
    mutants = (
        table.all_singles(wild)
        if arguments.all_singles
        else table.read_mutants(arguments.mutants, wild, arguments.score_column)
    )
    scores = _mean_scores(models, wild, mutants, arguments.mode)
    columns = {f"tracformer {arguments.mode}": [score.log_ratio for score in scores]}
    if any(len(mutant.changes) > 1 for mutant in mutants):
        columns["sum of singles"] = [score.sum_of_singles for score in scores]
    if arguments.rivals:
        columns |= _other_scores(models, wild, mutants, arguments.mode)
        columns |= _rivals(arguments.family, wild, mutants)
    if arguments.out:
        table.write_scores(arguments.out, scores)
        output.put(f"{arguments.out}: {len(scores)} mutants")
    if arguments.heat_map:
        draw_heat_map(arguments.heat_map, wild, scores, f"{models[0].name}, {arguments.mode}")
        output.put(f"{arguments.heat_map}: heat map")
    missing = sum(math.isnan(score.log_ratio) for score in scores)
    if missing:
        output.put(
            f"{missing} mutants have no score: their positions belong to no column of the model's "
            "family"
        )
    measured = [mutant.measured for mutant in mutants]
    if not all(map(math.isnan, measured)):
        _print_agreement(columns, measured)
    elif not arguments.out:
        _print_scores(scores)
    return 0


def _run_job(arguments: argparse.Namespace) -> int:
    """Score the mutants of a large table."""
    from tracformer.generation.batch_job import BatchJob
    from tracformer.proteins.mutant_work import MutantOptions

    names = ("mutants", "all_singles", "heat_map", "rivals")
    if wrong := [name for name in names if getattr(arguments, name)]:
        raise ValueError(f"--file is worked on in parts; leave {flag_of(wrong[0])} out")
    if arguments.out is None:
        raise ValueError("--file is a large table: give a folder for its scores with --out")
    if len(arguments.model or []) > 1:
        raise ValueError("give one --model; a batch job has one")
    model = arguments.model[0] if arguments.model else shared.default_model()
    wild = _wild_type(arguments, shared.open_model(model, verify=arguments.verify))
    job = BatchJob(
        "mutants",
        model,
        Path(arguments.file),
        MutantOptions(wild, arguments.mode),
        field=arguments.field or "mutant",
        verify=arguments.verify,
    )
    return shared.finish_job(arguments, job)


def add_design_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer design`."""
    _add_wild_type(parser)
    parser.add_argument(
        "--region",
        action="append",
        required=True,
        metavar="FIRST-LAST",
        help="positions to redesign; may be repeated",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="POSITION=RESIDUES",
        help="residues allowed at a position; may be repeated",
    )
    parser.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="POSITION=RESIDUES",
        help="residues forbidden at a position; may be repeated",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="FIRST-LAST",
        help="positions in a region that keep the wild type's residue; may be repeated",
    )
    parser.add_argument(
        "--max-changes",
        type=int,
        metavar="K",
        help="largest number of residues that differ from the wild type",
    )
    parser.add_argument(
        "--any-length",
        action="store_true",
        help="the region may become shorter or longer within the family's columns",
    )
    parser.add_argument("-n", type=int, default=10, metavar="N", help="designs (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="sampling temperature; lower is more conservative (default: 1.0)",
    )
    parser.add_argument("--out", metavar="FASTA", help="write the designs to this file")


def run_design(arguments: argparse.Namespace) -> int:
    """Run `tracformer design`."""
    from tracformer.files import write_atomically
    from tracformer.proteins import design as designs

    if len(arguments.model or []) > 1:
        raise ValueError("give one --model; designs are sampled from one")
    regions = tuple(designs.parse_region(text) for text in arguments.region)
    keep = [designs.parse_region(text) for text in arguments.keep]
    if arguments.max_changes is not None and arguments.max_changes < 1:
        raise ValueError(f"--max-changes is {arguments.max_changes}; it must be at least 1")
    constraints = designs.Constraints(
        regions,
        designs.parse_residues(arguments.allow),
        designs.parse_residues(arguments.forbid),
        frozenset(i for first, last in keep for i in range(first, last + 1)),
        arguments.max_changes,
        arguments.any_length,
    )
    model = arguments.model[0] if arguments.model else shared.default_model()
    lm = shared.open_model(model, verify=arguments.verify)
    wild = _wild_type(arguments, lm)
    found = designs.design(
        lm.model,
        lm.tokenizer,
        wild,
        constraints,
        n=arguments.n,
        seed=arguments.seed,
        temperature=arguments.temperature,
    )
    text = designs.to_fasta(found)
    if arguments.out:
        write_atomically(Path(arguments.out), text)
    else:
        output.put(text.rstrip("\n"))
    identity = designs.mean_identity([each.sequence for each in found])
    note = "" if len(found) == arguments.n else f"; {arguments.n} were requested"
    shared_part = "" if math.isnan(identity) else f", mean pairwise identity {identity:.1%}"
    _note(f"{len(found)} distinct designs{note}{shared_part}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _add_wild_type(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", action="append", metavar="MODEL", help="model or run folder, or name"
    )
    shared.add_no_verify(parser)
    parser.add_argument(
        "--wild-type",
        required=True,
        metavar="SEQUENCE",
        help="residues, a FASTA file with one record, or the name of a record of --family",
    )
    parser.add_argument(
        "--first",
        type=int,
        metavar="N",
        help="number of the first residue (default: that in the record's name, else 1)",
    )
    parser.add_argument(
        "--family",
        metavar="FILE|FOLDER",
        help="alignment of the model's family, or folder of `prepare`: its training rows",
    )


def _wild_type(arguments: argparse.Namespace, lm: "LanguageModel") -> "WildType":
    """Return the wild type in the notation that the model reads; say what has no column."""
    from tracformer.proteins.mutants import read_wild_type

    wild = read_wild_type(
        arguments.wild_type, lm.tokenizer, lm.name, arguments.first, arguments.family
    )
    if wild.outside:
        _note(
            f"{len(wild.outside)} residues of the wild type belong to no column of the family: "
            f"positions {', '.join(map(str, wild.outside))}"
        )
    return wild


def _mean_scores(
    models: "list[LanguageModel]", wild: "WildType", mutants: "list[Mutant]", mode: str
) -> "list[MutantScore]":
    from tracformer.proteins.mutants import MutantScore, score_mutants

    each = [score_mutants(lm.model, lm.tokenizer, wild, mutants, mode=mode) for lm in models]
    return [
        MutantScore(
            same[0].mutant,
            sum(score.log_ratio for score in same) / len(same),
            sum(score.sum_of_singles for score in same) / len(same),
        )
        for same in zip(*each, strict=True)
    ]


def _other_scores(
    models: "list[LanguageModel]", wild: "WildType", mutants: "list[Mutant]", mode: str
) -> dict[str, list[float]]:
    """Return what else the models say: the other mode, whole sequences, and each model alone."""
    from tracformer.proteins.mutants import whole_ratios

    found = {}
    other = "ac" if mode == "car" else "car"
    if all(other in lm.model.config.modes for lm in models):
        scores = _mean_scores(models, wild, mutants, other)
        found[f"tracformer {other}"] = [score.log_ratio for score in scores]
    if all("car" in lm.model.config.modes for lm in models):
        each = [whole_ratios(lm.model, lm.tokenizer, wild, mutants) for lm in models]
        found["tracformer whole"] = [sum(same) / len(same) for same in zip(*each, strict=True)]
    for lm in models if len(models) > 1 else []:
        scores = _mean_scores([lm], wild, mutants, mode)
        found[lm.name] = [score.log_ratio for score in scores]
    return found


def _rivals(family: str, wild: "WildType", mutants: "list[Mutant]") -> dict[str, list[float]]:
    from tracformer.progress import ProgressBar
    from tracformer.proteins.rivals import family_rows, rival_scores

    rows = family_rows(family)
    with ProgressBar("fitting arDCA", total=70) as bar:
        return rival_scores(rows, wild, mutants, progress=bar.update)


def _print_agreement(columns: dict[str, list[float]], measured: list[float]) -> None:
    from tracformer.proteins.mutants import agreement

    rows = [("method", "Spearman", "95% interval", "AUC", "NDCG@10%", "mutants")]
    for name, scores in columns.items():
        found = agreement(scores, measured)
        rows.append(
            (
                name,
                f"{found.spearman:.3f}",
                f"[{found.low:.3f}, {found.high:.3f}]",
                f"{found.auc:.3f}",
                f"{found.ndcg:.3f}",
                str(found.mutants),
            )
        )
    output.put("\n".join(output.table(rows)))


def _print_scores(scores: "list[MutantScore]", limit: int = 10) -> None:
    known = [score for score in scores if not math.isnan(score.log_ratio)]
    known.sort(key=lambda score: -score.log_ratio)
    rows = [("mutant", "log ratio", "sum of singles")]
    rows += [
        (score.mutant.name, f"{score.log_ratio:.4f}", f"{score.sum_of_singles:.4f}")
        for score in known[:limit]
    ]
    output.put("\n".join(output.table(rows)))
    if len(known) > limit:
        output.put(f"the {limit} highest of {len(known)}; --out FILE writes all")


mutants = Command(__doc__, add_arguments, run)
design = Command(DESIGN_DESCRIPTION, add_design_arguments, run_design)
