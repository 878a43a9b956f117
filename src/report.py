"""Make tables and figures of the runs that are finished.

python src/report.py                              report/ from the runs below runs/
python src/report.py results/baselines.csv results/ented.csv
                                                  report/ from tables of numbers
python src/report.py runs/holdout --csv all.csv   and every number, one row a run and metric
python src/report.py --table                      only print the means of each method
python src/report.py studies/ablation --variants  of a folder of such folders, with a column for their names
python src/report.py results/baselines.csv --compare results/paper.csv
                                                  print means beside published ones
python src/report.py results/ented.csv --compare results/paper.csv --rivals results/baselines.csv
                                                  and beside the best of the rivals
python src/report.py runs/flights/ented/rank=3/fold=0/seed=0 --counts RUN.png
                                                  predicted and observed counts of a run
python src/report.py runs/flights/ented/rank=3/fold=0/seed=0 --factors carrier FACTORS.png
                                                  its factors of a mode
python src/report.py --renew README.md            renew the tables in a text, see `renew`
"""

import argparse
import re
import shlex
import sys
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import figures
import tables
from ented.errors import one_line
from ented.runs import write
from results import (
    ABOUT,
    collect,
    collect_all,
    collect_calibration,
    collect_epochs,
    collect_variants,
    failed,
    finished,
    read_table,
    save,
    with_columns,
)

PAPER = Path(__file__).parent.parent / "results/paper.csv"
PAPER_COLUMNS = ["dataset", "method", "rank", "metric", "mean", "std"]
RUNS, STUDIES = Path("runs"), Path("studies")
TITLES = {
    "binary": "Binary tensors",
    "count": "Counts",
    "count_nll": "Counts, negative log-likelihood",
    "paired": "Every other method against ENTED",
    "ranks": "Mean places",
    "time": "Seconds of a fit",
    "failed": "Runs that failed",
}
INTRODUCTION = """\
All metrics are plug-in ones, as in the paper: mean ± standard deviation over folds. The paper's numbers are in square
brackets. Of the means over all folds of a dataset the best is bold. A place is 1 for the best of these, and how many
places a mean is of stands behind it. With protocol=paper, + and - mark a mean that is more than two published standard
deviations better or worse. A difference to ENTED, over the folds that both have, is above 0 where ENTED is better,
whichever way the metric goes; p is that of a paired t-test. Seconds are those of the final fit; with replicas=folds a
run has its share of those of all folds, which does not compare with the seconds of one alone."""

CAPTIONS = {
    "convergence": "Test AUC against epoch at the lowest rank: mean and standard deviation over folds. Each fold "
    + "counts until the last has ended, with its last value where it has ended before.",
    "inducing": "Plug-in RMSE, and seconds of an epoch, against the number of inducing points.",
    "calibration": "Of binary entries, the share of ones; of counts, the share between the predicted 5% and 95% "
    + "quantiles. Of ENTED at each dataset's lowest rank, in bins with equally many test entries.",
}


def write_report(arguments: argparse.Namespace) -> None:
    """Write report.md, the figures, and for each protocol a folder in which every table is a .md, a .tex and a .csv."""
    of_figures, out = figures_of(arguments), arguments.out
    numbers = numbers_of(arguments, or_none=len(of_figures) > 0)
    if arguments.csv:
        save(numbers, arguments.csv)
    compared = numbers.protocol != "validation"
    if len(numbers) and not compared.any():
        raise ValueError("all runs are of protocol=validation, which the report leaves out: give --table or --variants")
    numbers, left_out = numbers[compared], numbers[~compared]
    published = read_table(PAPER, PAPER_COLUMNS)
    text = ["# Report", INTRODUCTION]
    for protocol, part in numbers.groupby("protocol"):
        cells = tables.cells(part, published)
        parts = tables.published_tables(cells, marked=protocol == "paper")
        parts |= {"paired": tables.paired_table(part), "ranks": tables.rank_table(cells)}
        parts |= {"time": tables.time_table(part), "failed": tables.failure_table(part)}
        text.append(f"## protocol={protocol}")
        folder = out / protocol
        folder.mkdir(parents=True, exist_ok=True)
        cells.to_csv(folder / "cells.csv", index=False)
        for name in TITLES:  # nothing of an earlier report stays
            for suffix in ("md", "tex", "csv"):
                (folder / f"{name}.{suffix}").unlink(missing_ok=True)
        for name, table in parts.items():
            if len(table):
                (folder / f"{name}.md").write_text(tables.markdown(table) + "\n", encoding="utf-8")
                (folder / f"{name}.tex").write_text(tables.latex(table) + "\n", encoding="utf-8")
                table.replace(r"\*\*", "", regex=True).to_csv(folder / f"{name}.csv", index=False)
                text.append(f"### {TITLES[name]}\n\n{tables.markdown(table)}")
    out.mkdir(parents=True, exist_ok=True)
    for name, table, figure in of_figures:
        table.to_csv(out / f"{name}.csv", index=False)
        for suffix in ("png", "pdf"):
            figures.save(figure, out / f"{name}.{suffix}")
        text.append(f"## {name}\n\n![{name}]({name}.png)\n\n{CAPTIONS[name]}")
    (out / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    runs, failures = (len(part.drop_duplicates(ABOUT)) for part in (finished(numbers), failed(numbers)))
    others = len(left_out.drop_duplicates(ABOUT))
    print(
        f"{out / 'report.md'}: {runs} finished runs"
        + (f", {failures} failed ones" if failures else "")
        + (f"; {others} of protocol=validation left out" if others else "")
    )


def numbers_of(arguments: argparse.Namespace, or_none: bool) -> pd.DataFrame:
    """The numbers of the sources; none, where that may be, if no run was started but those of the studies."""
    started = (file for name in ("metrics.json", "error.txt") for file in RUNS.rglob(name))
    if or_none and arguments.source == [RUNS] and not any(started):
        return with_columns(pd.DataFrame())
    return collect_all(arguments.source)


def figures_of(arguments: argparse.Namespace) -> list[tuple[str, pd.DataFrame, Figure]]:
    """The name, the numbers and the figure, of each that there are numbers for, or that is asked for.

    The studies are looked for where no source is named.
    """
    found = []
    for name, collect_study, draw in [
        ("convergence", collect_epochs, figures.convergence),
        ("inducing", collect_variants, figures.inducing),
    ]:
        asked_for, default = getattr(arguments, name), STUDIES / name
        if asked_for or (arguments.source == [RUNS] and any(default.rglob("metrics.json"))):
            table = collect_study(asked_for or default)
            found.append((name, table, draw(table)))
    sources = [arguments.calibration] if arguments.calibration else [s for s in arguments.source if s.is_dir()]
    bins = [collect_calibration(source).query("model == 'ented'") for source in sources]
    if any(map(len, bins)):
        table = pd.concat(bins)
        found.append(("calibration", table, figures.calibration(table)))
    return found


def printed(arguments: argparse.Namespace) -> str:
    """The tables that are asked for, as Markdown."""
    if arguments.rivals and not arguments.compare:
        raise ValueError("--rivals goes with --compare")
    if arguments.variants and arguments.compare:
        raise ValueError("--variants and --compare: name the folder of one variant and leave --variants out")
    if arguments.variants and len(arguments.source) > 1:
        raise ValueError("--variants takes one folder of folders")
    numbers = collect_variants(arguments.source[0]) if arguments.variants else collect_all(arguments.source)
    if arguments.csv:
        save(numbers, arguments.csv)
    numbers = finished(numbers)
    if not arguments.compare:
        return "\n\n".join(map(tables.markdown, tables.means(numbers)))
    published = read_table(arguments.compare, PAPER_COLUMNS)
    if (numbers.protocol == "validation").any():
        raise ValueError(
            f"{arguments.source[0]} holds runs of protocol=validation, whose entries are not those of published "
            "numbers: name a folder without them"
        )
    if arguments.rivals:
        return tables.markdown(tables.beside(numbers, published, finished(collect(arguments.rivals))))
    parts = tables.comparison(numbers, published)
    return "\n\n".join(f"### {dataset}\n\n{tables.markdown(table)}" for dataset, table in parts.items())


def renew(file: Path) -> None:
    """Put the tables of today's numbers in a text, between the comments that tell how they are made.

    <!-- python src/report.py results/runs.csv --table -->
    <!-- end -->
    """

    def table(match: re.Match) -> str:
        if "<!--" in match[0][4:].removesuffix("<!-- end -->"):
            raise ValueError(f"{file}: <!-- end --> is missing after {match[1]}")
        arguments = parser().parse_args(shlex.split(match[2]))
        return f"{match[1]}\n{printed(arguments)}\n{match[3]}"

    text = file.read_text(encoding="utf-8")
    new, tables_found = re.subn(
        r"(<!-- python src/report.py (.*?) -->)\n.*?(<!-- end -->)", table, text, flags=re.DOTALL
    )
    if not tables_found:
        raise ValueError(
            f"{file} has no table to renew: put it between <!-- python src/report.py ... --> and <!-- end -->"
        )
    write(file, new)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument(
        "source", nargs="*", type=Path, default=[RUNS], help="roots of run folders (runs), or CSVs of numbers"
    )
    new.add_argument("--out", type=Path, default=Path("report"), help="folder for the report")
    new.add_argument("--convergence", type=Path, help="for its figure: studies/convergence, another folder, or a CSV")
    new.add_argument("--inducing", type=Path, help="for its figure: studies/inducing, another folder, or a CSV")
    new.add_argument("--calibration", type=Path, help="for its figure: the source, another folder, or a CSV")
    new.add_argument("--csv", type=Path, help="file for all numbers")
    new.add_argument("--table", action="store_true", help="only print the means of each method")
    new.add_argument("--variants", action="store_true", help="as --table; the source holds a root for each variant")
    new.add_argument("--compare", type=Path, help="print means beside those of a CSV of published ones")
    new.add_argument("--rivals", type=Path, help="with --compare: CSV or run folders of other methods")
    new.add_argument("--counts", type=Path, metavar="FILE", help="draw predicted and observed counts of a run")
    new.add_argument("--factors", nargs=2, metavar=("MODE", "FILE"), help="draw the factors of a mode of a run")
    new.add_argument("--renew", type=Path, nargs="+", metavar="TEXT", help="renew the tables in these texts")
    return new


def main() -> None:
    arguments = parser().parse_args()
    run = arguments.source[0]
    matplotlib.use("Agg")  # for files only
    try:
        if arguments.renew:
            for file in arguments.renew:
                renew(file)
        elif arguments.counts or arguments.factors:
            if arguments.counts:
                figures.save(figures.observed(run), arguments.counts)
            if arguments.factors:
                mode, file = arguments.factors
                figures.save(figures.factors(run, mode), Path(file))
        elif arguments.table or arguments.variants or arguments.compare or arguments.rivals:
            print(printed(arguments))
        else:
            write_report(arguments)
    except (OSError, ValueError) as error:  # files that cannot be written, or are not what a run leaves
        sys.exit(f"error: {one_line(error)}")


if __name__ == "__main__":
    main()
