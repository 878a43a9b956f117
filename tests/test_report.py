"""The report's tables, from run folders made by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from files_by_hand import fail_run, write_run
from training import ROOT

from tables import DATASETS, tex


def test_tables_and_csv(report, tmp_path):
    for fold, auc in enumerate([0.5, 0.7]):
        write_run(tmp_path, "digg", fold, {"auc": auc, "nll": 1.0, "nll_plugin": 2.0})
    code, out, _ = report(tmp_path, "--table", "--csv", tmp_path / "all.csv")
    assert code == 0
    # one table, for there are no counts; 0.141 is the sample deviation of 0.5 and 0.7
    assert out.splitlines() == [
        "| dataset | model | rank | protocol | missing | auc | nll | nll_plugin | runs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| digg | ented | 3 | paper | masked | 0.600 ± 0.141 | 1.000 ± 0.000 | 2.000 ± 0.000 | 2 |",
    ]
    numbers = pd.read_csv(tmp_path / "all.csv")
    assert len(numbers) == 6
    assert numbers.query("metric == 'auc'").value.tolist() == [0.5, 0.7]


def test_a_table_does_not_wait_for_lightning():
    script = "import sys; sys.path.insert(0, 'src'); import report; sys.exit('lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_method_without_likelihood_has_its_row(report, tmp_path):
    write_run(tmp_path, "ems", 0, {"rmse": 0.3, "mape": 0.4})
    _, out, _ = report(tmp_path, "--table")
    assert out.splitlines()[-1] == "| ems | ented | 3 | paper | masked | 0.300 | 0.400 | – | – | – | – | 1 |"


def test_means_beside_published_ones(report, tmp_path):
    """Marked where they are more than two published deviations apart: + for a lower NLL, - for a lower AUC."""
    for fold, auc in enumerate([0.5, 0.7]):
        write_run(tmp_path, "digg", fold, {"auc": auc, "nll": 1.0, "nll_plugin": 2.0})
    (tmp_path / "paper.csv").write_text(
        "dataset,method,rank,metric,mean,std\n"
        "digg,ENTED,3,auc,0.71,0.05\n"
        "digg,ENTED,3,nll,2.5,0.1\n"
        "digg,GCP,3,nll,inf,\n"
    )
    code, out, _ = report(tmp_path, "--compare", tmp_path / "paper.csv", "--csv", tmp_path / "all.csv")
    assert code == 0
    head, _, row = out.splitlines()[2:]
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["auc: published"] == "0.710 ± 0.050" and cells["auc: paper"] == "0.600 ± 0.141 -"
    assert cells["nll: published"] == "2.500 ± 0.100" and cells["nll: paper"] == "2.000 ± 0.000 +"
    assert cells["auc: holdout"] == "–" and cells["missing"] == "masked" and cells["runs |"] == "2/0 |"
    # the CSV that was written says the same
    assert report(tmp_path / "all.csv", "--compare", tmp_path / "paper.csv") == (0, out, "")


def test_means_beside_the_best_rival(report, tmp_path):
    """The rival of the other protocol, one with zeros for absent cells, and one without all folds do not count."""
    ours, theirs = {0: 0.7, 1: 0.9, 2: 0.8}, {0: 0.6, 1: 0.85, 2: 0.68}
    for fold in ours:
        write_run(tmp_path / "ours", "digg", fold, {"auc": ours[fold], "nll": 0.4, "nll_plugin": 0.5})
    line = "digg,{},{},{},0,{},{},{},{}\n"
    rows = [line.format("gcp", 3, fold, "paper", "masked", "auc", value) for fold, value in theirs.items()]
    rows += [line.format("worse", "", fold, "paper", "masked", "auc", 0.4) for fold in theirs]
    rows += [line.format("part", 3, fold, "paper", "masked", "auc", 0.99) for fold in (0, 1)]
    rows += [line.format("other", 3, 0, "holdout", "masked", "auc", 0.99)]
    rows += [line.format("zeros", 3, 0, "paper", "zeros", "auc", 0.99)]
    rows += [line.format("rank", 5, 0, "paper", "masked", "auc", 0.99)]
    (tmp_path / "rivals.csv").write_text("dataset,model,rank,fold,seed,protocol,missing,metric,value\n" + "".join(rows))
    (tmp_path / "paper.csv").write_text("dataset,method,rank,metric,mean,std\ndigg,ENTED,3,auc,0.81,0.05\n")
    arguments = ["--compare", tmp_path / "paper.csv", "--rivals", tmp_path / "rivals.csv"]
    code, out, err = report(tmp_path / "ours", *arguments)
    assert code == 0, err
    head, _, auc, nll = (line.strip("| ").split(" | ") for line in out.splitlines())
    cells = dict(zip(head, auc, strict=True))
    assert cells["published"] == "0.810 ± 0.050" and cells["ented"] == "0.800 ± 0.100"
    assert cells["best rival"] == "gcp 0.710 ± 0.128" and cells["ahead of"] == "rivals" and cells["runs"] == "3"
    # differences 0.1, 0.05 and 0.12: t = 0.09 / (0.0361 / sqrt 3) = 4.32, two degrees of freedom
    assert float(cells["p"]) == pytest.approx(0.0497, abs=1e-3)
    cells = dict(zip(head, nll, strict=True))
    assert cells["ented"] == cells["plug-in"] == "0.500 ± 0.000" and cells["best rival"] == cells["published"] == "–"


def test_variants_are_told_apart(report, tmp_path):
    """Though they are the same run by dataset, model and rank."""
    for variant, value in {"default": 0.5, "other": 0.7}.items():
        for fold in range(2):
            write_run(tmp_path / variant, "ems", fold, {"rmse": value + fold})
    (tmp_path / "unfinished").mkdir()
    code, out, err = report(tmp_path, "--variants", "--csv", tmp_path / "all.csv")
    assert code == 0, err
    assert "| default | 1.000 ± 0.707 |" in out and "| other | 1.200 ± 0.707 |" in out
    assert report(tmp_path / "all.csv", "--table") == (0, out, "")
    (tmp_path / "nothing").mkdir()
    assert "no folder with a finished run in" in report(tmp_path / "nothing", "--variants")[2]
    assert "takes one folder" in report(tmp_path, tmp_path, "--variants")[2]
    published = tmp_path / "paper.csv"
    published.write_text("dataset,method,rank,metric,mean,std\n")
    assert "leave --variants out" in report(tmp_path, "--variants", "--compare", published)[2]
    assert "--rivals goes with --compare" in report(tmp_path / "all.csv", "--rivals", published)[2]


def test_runs_of_validation_are_not_compared_with_published_ones(report, tmp_path):
    run = write_run(tmp_path, "ems", 0, {"rmse": 0.3, "rmse_plugin": 0.3})
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, "protocol": "validation"}))
    published = tmp_path / "paper.csv"
    published.write_text("dataset,method,rank,metric,mean,std\n")
    code, out, err = report(tmp_path, "--compare", published)
    assert code == 1 and not out and "protocol=validation" in err and err.count("\n") == 1


def test_a_report_says_how_many_runs_of_validation_it_leaves_out(report, tmp_path):
    write_run(tmp_path / "runs", "ems", 0, {"rmse_plugin": 0.5})
    other = write_run(tmp_path / "runs", "ems", 1, {"rmse_plugin": 0.5}) / "metrics.json"
    other.write_text(other.read_text().replace("paper", "validation"))
    code, out, _ = report(tmp_path / "runs", "--out", tmp_path / "report")
    assert code == 0 and out.endswith("report.md: 1 finished runs; 1 of protocol=validation left out\n")


def test_runs_with_both_settings_of_missing_are_not_averaged(report, tmp_path):
    for fold, missing in enumerate(["masked", "zeros"]):
        run = write_run(tmp_path, "ems", fold, {"rmse": 0.3, "rmse_plugin": 0.3})
        metrics = json.loads((run / "metrics.json").read_text())
        (run / "metrics.json").write_text(json.dumps({**metrics, "missing": missing}))
    published = tmp_path / "paper.csv"
    published.write_text("dataset,method,rank,metric,mean,std\n")
    code, _, err = report(tmp_path, "--compare", published)
    assert code == 1 and "both settings of missing" in err and err.count("\n") == 1
    assert report(tmp_path, "--table")[1].count("| ems |") == 2


def test_one_run_in_two_places_is_refused(report, tmp_path):
    first, second = (write_run(tmp_path / name, "ems", 0, {"rmse": 0.3}) for name in ("a", "b"))
    message = f"error: {first} and {second} hold the same run: name a folder that has one of them, or --variants\n"
    assert report(tmp_path) == (1, "", message)


def test_a_metric_that_one_fold_does_not_have_has_no_mean(report, tmp_path):
    for fold, auc in enumerate([0.5, None]):
        write_run(tmp_path, "digg", fold, {"auc": auc, "nll": 1.0, "nll_plugin": 2.0})
    assert "| – | 1.000 ± 0.000 | 2.000 ± 0.000 | 2 |" in report(tmp_path, "--table")[1]


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two folds of EMS: ENTED and gcp have both, one of bpcp's and all of ncpd's failed, and vbgcp has none."""
    monkeypatch.setitem(DATASETS, "ems", 2)
    for fold in range(2):
        for model, rmse, nll in [("ented", 0.30, 2.7), ("gcp", 0.32 + 0.02 * fold, 3.0), ("bpcp", 0.29, 2.9)]:
            if (model, fold) != ("bpcp", 1):
                plugin = {"rmse_plugin": rmse, "mape_plugin": 0.4, "nll_plugin": nll}
                write_run(tmp_path / "runs", "ems", fold, plugin | {"rmse": 9.0}, model, seconds=fold + 1.0)
        fail_run(tmp_path / "runs", "ems", fold, "ncpd")
    fail_run(tmp_path / "runs", "ems", 1, "bpcp")
    return tmp_path / "runs"


def rows(file: Path) -> dict[str, list[str]]:
    """The rows of a Markdown table by the method."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in file.read_text().splitlines()]
    method = lines[0].index("method")
    return {line[method]: line[method + 1 :] for line in [lines[0], *lines[2:]]}


def test_the_papers_tables(report, runs, tmp_path):
    """Ours, the paper's in brackets; failed, missing and incomplete cells are told apart, and the best is bold."""
    code, out, err = report(runs, "--out", tmp_path / "report")
    assert code == 0, err
    assert out == f"{tmp_path / 'report/report.md'}: 5 finished runs, 3 failed ones\n"
    table = rows(tmp_path / "report/paper/count.md")
    assert table["method"] == ["RMSE, rank 3", "RMSE, rank 5", "RMSE, rank 10"] + [
        f"MAPE, rank {rank}" for rank in (3, 5, 10)
    ]
    assert table["ENTED"][0] == "**0.300 ± 0.000** [0.305 ± 0.049]"
    # 0.33 is 8.1 published deviations below 0.728; 0.014 is the sample deviation of 0.32 and 0.34
    assert table["GCP"][0] == "0.330 ± 0.014 + [0.728 ± 0.049]"
    assert table["BPCP"][0] == "0.290 (1 of 2 folds, 1 failed) [0.722 ± 0.082]"
    assert table["NCPD"][0] == "failed [0.835 ± 0.029]" and table["VBGCP"][0] == "– [0.345 ± 0.064]"
    assert table["ENTED"][1] == "– [0.319 ± 0.056]" and "digg" not in (tmp_path / "report/report.md").read_text()
    assert rows(tmp_path / "report/paper/count_nll.md")["ENTED"][0] == "**2.700 ± 0.000** + [2.950 ± 0.050]"
    lines = (tmp_path / "report/paper/count_nll.tex").read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{lllll}" and lines[1] == r"\toprule" and lines[-2] == r"\bottomrule"
    ented = r"ems & ENTED & \textbf{2.700 $\pm$ 0.000} $+$ [2.950 $\pm$ 0.050] & -- [2.970 $\pm$ 0.080] & "
    assert ented + r"-- [2.910 $\pm$ 0.040] \\" in lines
    failed = (tmp_path / "report/paper/failed.md").read_text()
    assert failed.count("| RuntimeError: no room |") == 3


def test_a_part_of_the_folds_is_marked(report, tmp_path):
    """Against those that the dataset has, though no method has more."""
    for fold in range(2):
        write_run(tmp_path / "runs", "ems", fold, {"rmse_plugin": 0.5})
    assert report(tmp_path / "runs", "--out", tmp_path / "report")[0] == 0
    assert rows(tmp_path / "report/paper/count.md")["ENTED"][0].startswith("0.500 ± 0.000 (2 of 5 folds) ")


def test_a_method_that_stands_alone_is_not_the_best(report, tmp_path):
    write_run(tmp_path / "runs", "dblp", 0, {"auc": 0.9})
    assert report(tmp_path / "runs", "--out", tmp_path / "report")[0] == 0
    assert rows(tmp_path / "report/paper/binary.md")["ENTED"][0] == "0.900 - [0.950 ± 0.003]"


def test_the_folds_of_the_datasets():
    for name, folds in DATASETS.items():
        source = yaml.safe_load((ROOT / f"conf/dataset/{name}.yaml").read_text())["source"]
        assert source.get("folds", 1) == folds


def test_the_tables_beside(report, runs, tmp_path):
    report(runs, "--out", tmp_path / "report")
    # of two folds: differences 0.02 and 0.04, t = 0.03 / (0.01414 / sqrt 2) = 3, one degree of freedom: p = 0.205
    paired = pd.read_csv(tmp_path / "report/paper/paired.csv").set_index(["metric", "method"])
    assert paired.loc[("rmse", "GCP")][["difference", "p", "folds"]].tolist() == [0.03, "0.2", 2]
    assert paired.loc[("rmse", "BPCP")][["difference", "p", "folds"]].tolist() == [-0.01, "–", 1]
    ranks = rows(tmp_path / "report/paper/ranks.md")
    assert ranks["method"] == ["MAPE, counts", "NLL, counts", "RMSE, counts"]
    assert ranks["ENTED"] == ["1.5 (1)", "1.0 (1)", "1.0 (1)"] and ranks["GCP"] == ["1.5 (1)", "2.0 (1)", "2.0 (1)"]
    assert "BPCP" not in ranks  # one of its folds failed
    time = pd.read_csv(tmp_path / "report/paper/time.csv")
    assert time.columns.tolist() == ["dataset", "rank", "GCP", "BPCP", "ENTED"]
    assert time.iloc[0].tolist() == ["ems", 3, 1.5, 1.0, 1.5]


def test_seconds_long_and_short(report, tmp_path):
    for model, seconds in {"ented": 1294.0, "gcp": 0.02}.items():
        write_run(tmp_path / "runs", "ems", 0, {"rmse_plugin": 0.5}, model, seconds)
    assert report(tmp_path / "runs", "--out", tmp_path / "report")[0] == 0
    assert "| ems | 3 | 0.02 | 1294.00 |" in (tmp_path / "report/paper/time.md").read_text()


def test_a_report_from_tables_of_numbers_is_the_same(report, runs, tmp_path):
    report(runs, "--out", tmp_path / "runs-report", "--csv", tmp_path / "all.csv")
    assert report(tmp_path / "all.csv", "--out", tmp_path / "csv-report")[0] == 0
    files = sorted(file.relative_to(tmp_path / "runs-report") for file in (tmp_path / "runs-report").rglob("*.*"))
    names = {"binary": 0, "count": 3, "count_nll": 3, "paired": 3, "ranks": 3, "time": 3, "failed": 3, "cells": 1}
    assert {name: sum(file.stem == name for file in files) for name in names} == names
    for file in files:
        assert (tmp_path / "runs-report" / file).read_bytes() == (tmp_path / "csv-report" / file).read_bytes(), file
    code, _, err = report(runs, tmp_path / "all.csv", "--out", tmp_path / "both")
    assert code == 1 and "hold the same run" in err and err.count("\n") == 1
    assert "hold the same run" in report(runs, runs, "--table")[2]


def test_renewed_tables(report, runs, tmp_path):
    text = tmp_path / "text.md"
    comment = f"<!-- python src/report.py {runs} --table -->"
    text.write_text(f"before\n{comment}\nold\n<!-- end -->\nbetween\n{comment}\n<!-- end -->\nafter\n")
    _, table, _ = report(runs, "--table")
    assert report("--renew", text) == (0, "", "")
    once = f"{comment}\n{table}<!-- end -->\n"
    assert text.read_text() == f"before\n{once}between\n{once}after\n"
    text.write_text("nothing")
    code, _, err = report("--renew", text)
    assert code == 1 and "has no table to renew" in err
    lost_end = f"{comment}\nprecious\n{comment}\n<!-- end -->\n"
    text.write_text(lost_end)
    code, _, err = report("--renew", text)
    assert code == 1 and "<!-- end --> is missing" in err and text.read_text() == lost_end


def test_a_report_of_failed_runs_only(report, tmp_path):
    fail_run(tmp_path / "runs", "ems", 0, "gcp")
    code, _, err = report(tmp_path / "runs", "--out", tmp_path / "report")
    assert code == 0, err
    assert rows(tmp_path / "report/paper/count.md")["GCP"][0] == "failed [0.728 ± 0.049]"


def test_a_method_without_a_rank_has_those_of_its_dataset(report, tmp_path, monkeypatch):
    """Of the published tables and ours; of a dataset without any, all are one."""
    monkeypatch.setitem(DATASETS, "ems", 1)  # fold
    for dataset, ranks in {"ems": (3, 20), "flights": ()}.items():
        for model, rank in [("main_effects", None), *(("ented", rank) for rank in ranks)]:
            run = write_run(tmp_path / f"runs/{rank}", dataset, 0, {"rmse_plugin": 0.5}, model)
            metrics = json.loads((run / "metrics.json").read_text())
            (run / "metrics.json").write_text(json.dumps(metrics | {"rank": rank}))
    code, _, err = report(tmp_path / "runs", "--out", tmp_path / "report")
    assert code == 0, err
    cells = pd.read_csv(tmp_path / "report/paper/cells.csv").query(
        "model == 'main_effects' and metric == 'rmse_plugin'"
    )
    assert cells[cells["mean"].notna()].groupby("dataset")["rank"].apply(set).to_dict() == {
        "ems": {"3", "5", "10", "20"},
        "flights": {"all"},
    }
    # it is compared where somebody else has a number
    assert rows(tmp_path / "report/paper/ranks.md")["main effects"] == ["1.5 (2)"]


def test_the_seeds_of_a_fold_are_counted(report, tmp_path):
    """A mean of which a seed is missing is not taken for a whole one."""
    for seed in range(2):
        run = write_run(tmp_path / f"runs/{seed}", "dblp", 0, {"auc": 0.9})
        metrics = json.loads((run / "metrics.json").read_text())
        (run / "metrics.json").write_text(json.dumps(metrics | {"seed": seed}))
    fail_run(tmp_path / "runs/2", "dblp", 0, "ented")
    assert report(tmp_path / "runs", "--out", tmp_path / "report")[0] == 0
    assert rows(tmp_path / "report/paper/binary.md")["ENTED"][0].startswith("0.900 ± 0.000 (1 of 1 folds, 1 failed)")


def test_text_that_latex_reads_in_another_way():
    assert tex("a_b & 2^32 -1 | 50%") == r"a\_b \& 2\textasciicircum{}32 -1 | 50\%"
    assert tex("**0.5 ± 0.1** - [0.7 ± 0.1]") == r"\textbf{0.5 $\pm$ 0.1} $-$ [0.7 $\pm$ 0.1]"


def test_mistakes_end_with_one_line(report, tmp_path):
    run = write_run(tmp_path / "runs", "digg", 0, {"auc": 0.5})
    point = write_run(tmp_path / "runs", "ems", 0, {"rmse": 0.5})
    (point / "config.yaml").write_text("dataset: {name: ems}\n")
    (point / "predictions.csv").write_text("title,value,mean\n0,3,2.5\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/metrics.json").write_text("{}")
    half = write_run(tmp_path / "half", "digg", 0, {"auc": 0.5})
    (half / "predictions.csv").write_text("title,value,mean\n0,1,0.5\n")
    (half / "metrics.json").write_text((half / "metrics.json").read_text().replace("metrics", "numbers"))
    validation = write_run(tmp_path / "validation", "digg", 0, {"auc": 0.5}) / "metrics.json"
    validation.write_text(validation.read_text().replace("paper", "validation"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/metrics.json").write_text("")
    (tmp_path / "published.csv").write_text("dataset,model\n")
    binary = write_run(tmp_path / "runs", "enron", 0, {"auc": 0.5})
    (binary / "predictions.csv").write_text("title,value,mean\n0,1,0.5\n")
    fail_run(tmp_path / "failed", "digg", 0, "gcp")
    next((tmp_path / "failed").rglob("config.yaml")).write_text("")
    report(tmp_path / "runs", "--table", "--csv", tmp_path / "all.csv")
    head, *lines = (tmp_path / "all.csv").read_text().splitlines()
    fields = lines[0].split(",")
    value = head.split(",").index("value")
    for name, text in {
        "header": head,
        "text": "\n".join([head, ",".join([*fields[:value], "abc", *fields[value + 1 :]])]),
        "cut off": "\n".join([head, lines[0], lines[0].replace("auc", "nll"), lines[0].replace(",0,0,", ",1,0,")]),
    }.items():
        (tmp_path / f"{name}.csv").write_text(text)
    gcp = write_run(tmp_path / "gcp/runs", "digg", 0, {"auc": 0.5}, "gcp").parents[4]
    of_two = [tmp_path / "runs", gcp, "--compare", ROOT / "results/paper.csv", "--rivals", tmp_path / "all.csv"]
    for arguments, message in [
        ([tmp_path / "header.csv"], "holds no run"),
        ([tmp_path / "text.csv"], "value is abc in row 0"),
        ([tmp_path / "cut off.csv"], "have different metrics: is it cut off?"),
        (of_two, "those of one method"),
        ([tmp_path / "runs", "--inducing", tmp_path / "runs", "--out", tmp_path / "report"], "no number of inducing"),
        ([tmp_path / "empty"], "no finished run"),
        ([tmp_path / "nowhere", "--out", tmp_path / "report"], "nowhere: train something first, or name"),
        ([tmp_path / "damaged"], "metrics.json is damaged (KeyError('dataset'))"),
        ([tmp_path / "cut"], "cut/metrics.json is damaged"),
        ([tmp_path / "published.csv"], "published.csv has no column rank"),
        ([tmp_path / "runs", "--compare", tmp_path / "published.csv"], "published.csv has no column method"),
        ([tmp_path / "runs", "--compare", report.script], "report.py is not a CSV"),
        ([tmp_path / "runs", "--table", "--csv", tmp_path / "nowhere/all.csv"], "nowhere"),
        ([tmp_path, "--counts", tmp_path / "x.png"], "is not the folder of a finished run"),
        ([run, "--counts", tmp_path / "x.png"], "has no predictions.csv (lost, or"),
        ([binary, "--counts", tmp_path / "x.png"], "binary"),
        ([point, "--counts", tmp_path / "x.png"], "without quantiles"),
        ([point, "--factors", "mode", tmp_path / "x.png"], "has no modes.json (lost, or"),
        (
            [tmp_path / "runs", "--calibration", tmp_path / "no.csv", "--out", tmp_path / "report"],
            "no.csv: No such file",
        ),
        ([tmp_path / "failed"], "config.yaml is lost or damaged"),
        ([tmp_path / "half"], "metrics.json is damaged (KeyError('metrics'))"),
        ([tmp_path / "validation"], "all runs are of protocol=validation"),
    ]:
        code, out, err = report(*arguments)
        assert code == 1 and not out and err.startswith("error: ") and err.count("\n") == 1, err
        assert message in err
    assert not (tmp_path / "report").exists()
