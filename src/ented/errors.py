"""The error that ends with one line, and that line."""


class InputError(ValueError):
    """A user's mistake. The message is one line that says what is wrong, where, and what to do."""


def one_line(error: OSError | ValueError) -> str:
    """What is wrong, and with which file."""
    named = isinstance(error, OSError) and error.filename
    file = str(error.filename).removesuffix(".partial") if named else ""  # the name until all is written
    return " ".join((f"{file}: {error.strerror}" if named else str(error)).split())
