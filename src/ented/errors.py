"""The error that ends with one line, and that line."""


class InputError(ValueError):
    """A user's mistake. The message is one line that says what is wrong, where, and what to do."""


def one_line(error: OSError | ValueError) -> str:
    """What is wrong, and with which file."""
    named = isinstance(error, OSError) and error.filename
    return " ".join((f"{error.filename}: {error.strerror}" if named else str(error)).split())
