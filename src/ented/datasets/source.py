"""Find a data file in a local folder, or download it once. Published files are checked by SHA-256."""

import logging
import os
from pathlib import Path

import pooch

from ented.errors import InputError

log = logging.getLogger("ented")
pooch.get_logger().setLevel(logging.WARNING)  # `fetch` logs the download itself, in one line

CHECKSUMS = {
    path: checksum for checksum, path in map(str.split, Path(__file__).with_name("SHA256SUMS").read_text().splitlines())
}


def fetch(path: str, url: str | None, data_dir: str | None) -> Path:
    """Return a data file from `data_dir`, else from the folder ENTED_DATA, else from its public home.

    Parameters
    ----------
    path : str
        Place of the file below the data folder, such as "enron/fold-0.npz".
    url : str or None
        Where to download the file. It is kept in the user's cache, so this happens once. A file that has no
        line in SHA256SUMS is accepted unchecked from a local folder and never downloaded.
    data_dir : str or None
        Local folder, searched first.

    Raises
    ------
    InputError
        If a named folder does not exist, the file differs from the published one, or it cannot be had.
    """
    checksum = CHECKSUMS.get(path)
    places = []
    for setting, value in (("data_dir", data_dir), ("ENTED_DATA", os.environ.get("ENTED_DATA"))):
        if not value:
            continue
        folder = Path(str(value)).expanduser()
        if not folder.is_dir():
            raise InputError(f"{setting}={value} is not a folder; correct or unset it")
        file = folder / path
        if file.is_file():
            if checksum and pooch.file_hash(str(file)) != checksum:
                raise InputError(
                    f"{file} differs from the published file (wrong SHA-256); "
                    "replace it, or delete it to have it downloaded"
                )
            return file
        places.append(file)

    if url is None or checksum is None:
        place = places[0] if places else f"<folder>/{path}"
        raise InputError(f"{path} not found; put it at {place} and name the folder by data_dir= or ENTED_DATA")

    cached = Path(pooch.os_cache("ented")) / path
    if not cached.is_file():
        log.info("downloading %s to %s", url, cached)
    try:
        # pooch writes to a temporary file and renames it only when the checksum is right.
        pooch.retrieve(url, f"sha256:{checksum}", fname=cached.name, path=cached.parent)
    except (OSError, ValueError) as error:  # no network, no space, wrong checksum
        place = places[0] if places else cached
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} cannot be downloaded; put it at {place}, or name the folder that holds {path} "
            f"by data_dir= or ENTED_DATA ({url}: {reason})"
        ) from None
    return cached
