"""Protocols and variants: what is held out, what is chosen by it, and what is tested."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training import TRAIN, binary, counts

from ented.recorder import best_epoch
from experiment import sizes_of


def test_the_epochs_are_chosen_on_held_out_training_entries(command, tiny):
    assert (
        command(*binary(tiny), "fold=0", "epochs=15", "lr=0.1", "protocol.patience=4", "model.annealing=false")[0] == 0
    )
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    searched = pd.read_csv(run / "holdout/epochs.csv")
    best = int(searched.val_nll.idxmin()) + 1
    assert json.loads((run / "metrics.json").read_text())["epochs"] == len(pd.read_csv(run / "epochs.csv")) == best
    assert len(searched) == min(15, best + 4)


def test_without_patience_there_is_no_search_but_for_a_learning_rate(command, tiny):
    """By the held-out score after the last epoch of each."""
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    assert command(*binary(tiny), "fold=0")[0] == 0
    assert not (run / "holdout").exists() and len(pd.read_csv(run / "epochs.csv")) == 3
    assert command(*binary(tiny), "fold=0", "lr=[0.3,0.01]", "force=true")[0] == 0
    scores = {lr: pd.read_csv(run / f"holdout/lr={lr}/epochs.csv").val_nll.iloc[-1] for lr in (0.3, 0.01)}
    best = min(scores, key=scores.get)
    chosen = json.loads((run / "holdout/chosen.json").read_text())
    assert chosen == {"lr": best, "epochs": 3, "val_nll": pytest.approx(scores[best])}
    assert len(pd.read_csv(run / "epochs.csv")) == 3


def test_best_epoch_stops_looking_when_patience_ends():
    rows = [{"val_nll": value} for value in (3.0, 2.0, 2.5, 2.4, 1.0)]
    assert best_epoch(rows, patience=10) == 5
    assert best_epoch(rows, patience=2) == 2  # the epochs after the fourth are never seen
    assert best_epoch(rows[:4], patience=None) == 4
    assert best_epoch([{"val_nll": math.nan}, *rows], patience=10) == 6


@pytest.mark.parametrize(
    ("entries", "batch_size", "epochs"),
    [
        (1000, 128, 750),  # 8 batches an epoch
        (2**16, 2048, 188),  # 32, and 6000 / 32 = 187.5
        (4 * 2**16, 2048, 188),  # 128, and 4 * 6000 / 128 the same
        (64 * 2**16, 2048, 49),  # 2048, and 10^5 / 2048 = 48.8
    ],
)
def test_the_steps_grow_with_the_entries_up_to_a_number(entries, batch_size, epochs):
    cfg = OmegaConf.create({"batch_size": "auto", "epochs": "auto"})
    assert sizes_of(cfg, entries) == (batch_size, epochs)
    assert sizes_of(OmegaConf.create({"batch_size": "all", "epochs": 7}), entries) == ("all", 7)


@pytest.mark.parametrize("variant", [file.stem for file in (TRAIN.parent.parent / "conf/variant").glob("*.yaml")])
def test_a_variant_changes_the_default(variant):
    with initialize_config_dir(str(TRAIN.parent.parent / "conf"), version_base="1.3"):
        default, other = (
            OmegaConf.to_container(compose("config", ["dataset=ems", *override]), resolve=True)
            for override in ([], [f"variant={variant}"])
        )
    assert (default == other) == (variant == "default")
    ablation = yaml.safe_load((TRAIN.parent.parent / "conf/experiment/ablation.yaml").read_text())
    assert variant in ablation["hydra"]["sweeper"]["params"]["variant"].split(",")


@pytest.mark.parametrize("together", [[], ["replicas=folds"]])
def test_validation_tests_a_tenth_of_the_training_entries(command, tiny, together):
    """Others for each seed; what the test entries are changes nothing."""
    data = np.load(tiny / "ones/fold-0.npz")
    train, test = data["train"], data["test"]
    tables = []
    for values in (test[:, 3], 1 - test[:, 3]):
        np.savez(tiny / "ones/fold-0.npz", train=train, test=np.column_stack([test[:, :3], values]))
        code, _, err = command(*binary(tiny), "fold=0", "seed=[0,1]", "protocol=validation", "force=true", *together)
        assert code == 0, err
        folder = tiny.parent / "runs/ones/ented/rank=2/fold=0"
        tables.append([pd.read_csv(folder / f"seed={seed}/predictions.csv") for seed in (0, 1)])
    for before, after in zip(*tables, strict=True):
        pd.testing.assert_frame_equal(before, after)
        assert len(before) == 9 and all(row in train.tolist() for row in before.iloc[:, :4].values.tolist())
    assert not tables[0][0].iloc[:, :3].equals(tables[0][1].iloc[:, :3])
    assert "81 training entries, 9 test entries" in (folder / "seed=0/train.log").read_text()


def test_the_smallest_count_is_that_of_all_training_entries(command, tiny):
    """Also where validation holds out the only zero, as each of these seeds does or does not."""
    data = np.load(tiny / "counts/fold-0.npz")
    train = data["train"]
    train[:, 3] = np.arange(90) > 0
    np.savez(tiny / "counts/fold-0.npz", train=train, test=data["test"])
    code, _, err = command(*counts(tiny), "fold=0", "seed=[0,1,2,3,4,5,6,7,8,9,10,11]", "protocol=validation")
    assert code == 0, err
    tables = [pd.read_csv(file) for file in (tiny.parent / "runs/counts/ented/rank=2/fold=0").glob("*/predictions.csv")]
    assert len(tables) == 12 and {(table.value == 0).any() for table in tables} == {True, False}


def test_folds_whose_counts_start_at_different_numbers_are_refused(command, tiny):
    for fold, smallest in enumerate((0, 1)):
        rows = dict(np.load(tiny / f"counts/fold-{fold}.npz"))
        for part in rows.values():
            part[:, 3] = np.maximum(part[:, 3], smallest)
        np.savez(tiny / f"counts/fold-{fold}.npz", **rows)
    code, _, err = command(*counts(tiny))
    assert code == 1 and err.count("\n") == 1 and "set likelihood.smallest=0" in err
    assert not (tiny.parent / "runs").exists()
    assert command(*counts(tiny), "likelihood.smallest=0")[0] == 0


def test_what_only_ented_has_is_no_setting_of_another_method(command, tiny):
    assert command(*binary(tiny), "fold=0", "model=main_effects")[0] == 0
    code, _, err = command(*binary(tiny), "fold=0", "model=main_effects", "protocol.ented.components=1")
    assert code == 0, err
    code, _, err = command(*binary(tiny), "fold=0", "model=main_effects", "variant=components_1")
    assert code == 1 and err == "error: variant=components_1 is one of model=ented, not of main_effects\n"


def test_validation_needs_held_out_entries(command, tiny):
    code, _, err = command(*binary(tiny), "protocol=validation", "protocol.held_out=0")
    assert code == 1 and "protocol.held_out=0: protocol=validation tests what it holds out" in err
    assert not (tiny.parent / "runs").exists()


def test_paper_protocol_uses_the_published_settings(command, tiny):
    code, _, err = command(*binary(tiny), "fold=0", "protocol=paper", "dataset.paper.epochs=5", "epochs=5")
    assert code == 0, err
    config = yaml.safe_load((tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0/config.yaml").read_text())
    assert (config["lr"], config["rho"], config["batch_size"]) == (1e-3, 0.1, 128)
    epochs = pd.read_csv(tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0/epochs.csv")
    assert len(epochs) == 5 and not (tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0/holdout").exists()
