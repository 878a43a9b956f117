"""A user's mistakes in settings and data end with one line, and with nothing written."""

import numpy as np
import pytest
from training import binary

WHOLE, POSITIVE = "it must be a whole number from 1", "it must be a number above 0"
MISTAKES = {
    "dataset=nope": "choose from article, dblp, digg, ems, enron, flights, jhu, stream, table",
    "model=nope": "choose from bcp, bpcp, costco, ented, gcp, gptf, gptf_pg, main_effects, mdtf, ncpd, sbtr, vbgcp",
    "missing=none": "it must be masked or zeros",
    "protocol=nope": "choose from holdout, paper, validation",
    "likelihood=nope": "choose from bernoulli, negative_binomial",
    "dataset=null": "Config group override must be a string",
    "model=null": "Config group override must be a string",
    "rnk=3": "rnk: there is no such setting; those that there are stand in conf/, some of them for one dataset=",
    "rank": "cannot read rank: a setting is name=value",
    "rank=2,3": "rank=2,3 is a list of cells, for a grid: put -m before the settings",
    "launcher=parallel": "launcher=parallel is for a grid: put -m before the settings",
    "+rnk=3": "+rnk=3: there is no such setting",
    "+model.nope=1": "+model.nope=1: there is no such setting",
    "model.rank=5": "set rank=5",
    "model.lr=0.05": "set lr=0.05",
    "model.inducing=50": "set inducing=50",
    "model.milestones=5": "a list of shares of the epochs",
    "protocol.milestones=[2]": "a list of shares of the epochs",
    "force=maybe": "it must be true or false",
    "runs_dir=null": "the name of a folder",
    "runs_dir=a=b": "quote a value",
    "rank=0": WHOLE,
    "rank=two": WHOLE,
    "rank=2.5": WHOLE,
    "rank=null": WHOLE,
    "rank=[3,5]": WHOLE,
    "threads=100000": "a whole number from 1 to 1024",
    "likelihood.zeta=1e9": "above 0 and at most 1e4",
    "dataset=ems dataset.source.modes=user": "give a list of names",
    "inducing=0": WHOLE,
    "inducing=101": "cannot be divided into model.blocks=2 equal blocks",
    "model.blocks=0": WHOLE,
    "epochs=1e3": WHOLE,
    "batch_size=-1": WHOLE,
    "protocol.patience=0": WHOLE,
    "seed=-1": "from 0 to 2^32 - 1",
    "seed=99999999999": "from 0 to 2^32 - 1",
    "fold=1": "choose from 0",
    "fold=some": "it must be a number or all",
    "lr=0": POSITIVE,
    "lr=fast": POSITIVE,
    "lr=inf": POSITIVE,
    "lr=null": POSITIVE,
    "lr=[]": POSITIVE,
    "lr=[0.1,0]": POSITIVE,
    "lr=[0.1,0.1]": "a list of different ones",
    "seed=[1,1]": "a list of different ones",
    "dataset.name=../flights": "it must be a name without a /",
    "dataset.name=..": "it must be a name without a /",
    "dataset=ems dataset.source.modes=[mean,b]": "none that of a column of predictions.csv",
    "replicas=seeds": "it must be null or folds",
    "rho=1.5": "above 0 and at most 1",
    "dtype=float16": "it must be float32 or float64",
    "trainer.accelerator=tpu": "it must be auto, cpu, or cuda",
    "protocol=paper": "no published settings",
    "likelihood=bernoulli": "use likelihood=negative_binomial",
    "likelihood.zeta=0": "above 0 and at most 1e4",
    "checkpoint_seconds=soon": "it must be a number from 0",
    "model.jitter=-1": "it must be a number from 0",
    "model.components=0": "it must be a whole number from 1",
    "protocol.held_out=1": "from 0 and below 1",
    "protocol.patience=20": "set model.annealing=false or protocol.patience=null",
    "model=gptf protocol.milestones=[0.5]": "set protocol.milestones=[] or protocol.patience=null",
    "protocol.held_out=1e-9 lr=[0.1,0.01]": "leaves an empty part",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_one_line_and_nothing_written(command, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    assert MISTAKES[mistake] in command.mistake(*mistake.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model=gptf"], "replicas=folds is for model=ented and gptf_pg, not gptf"),
        (["logger=wandb"], "replicas=folds goes with logger=csv and one device"),
        (["callbacks=convergence"], "callbacks=convergence goes with one run at a time"),
        (["trainer=ddp"], "replicas=folds goes with logger=csv and one device"),
        (["model.sparse_gradients=true"], "model.sparse_gradients=true goes with one run at a time and one device"),
        (["lr=[0.1,0.2]", "protocol=paper"], "only protocol=holdout and validation choose one of several"),
        (["lr=[0.1,0.2]", "model=main_effects"], "model=main_effects has no learning rate"),
    ],
)
def test_settings_that_do_not_go_together(command, tiny, settings, message):
    code, _, err = command(*binary(tiny), "replicas=folds", *settings)
    assert code == 1 and err.count("\n") == 1 and message in err
    assert not (tiny.parent / "runs").exists()


@pytest.mark.parametrize("replicas", ["null", "folds"])
def test_a_learning_rate_that_fails_is_named(command, tiny, replicas):
    code, _, err = command(*binary(tiny), f"replicas={replicas}", "lr=[0.1,1e300]")
    assert code == 1 and err.count("\n") == (1 if replicas == "folds" else 2)  # the other fold is tried all the same
    assert all("in epoch 1 with lr=1e+300: lower lr=" in line for line in err.splitlines())


def test_mistakes_in_the_data_end_with_one_line(command, tiny):
    rows = np.load(tiny / "ones/fold-0.npz")
    bad = {
        "missing": None,
        "corrupt": b"PK\x03\x04 is not all that a zip file needs",
        "undefined": {"value": np.nan},
        "negative": {"value": -1},
        "outside": {"mode": 6},
        "empty": "test",
    }
    for name, fault in bad.items():
        (tiny / name).mkdir()
        file = tiny / name / "fold-0.npz"
        arrays = {split: rows[split].astype(float) for split in ("train", "test")}
        if isinstance(fault, bytes):
            file.write_bytes(fault)
        elif fault:
            if fault == "test":
                arrays["test"] = arrays["test"][:0]
            elif "value" in fault:
                arrays["train"][7, 3] = fault["value"]
            else:
                arrays["train"][7, 0] = fault["mode"]
            np.savez(file, **arrays)
        assert name in command.mistake(*binary(tiny, name), "fold=0")  # the folder
    assert not (tiny.parent / "runs").exists()


def test_a_mistake_in_one_cell_of_a_grid_does_not_stop_the_others(command, tiny):
    code, _, err = command("-m", *binary(tiny), "rank=0,1", "fold=0")
    assert code == 1 and err.count("error: ") == 1 and "Traceback" not in err
    assert (tiny.parent / "runs/ones/ented/rank=1/fold=0/seed=0/metrics.json").exists()
