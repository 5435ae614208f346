"""Numbers with units."""


def bytes_text(count: float) -> str:
    """A number of bytes with the decimal unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds_text(seconds: float) -> str:
    """A time with the unit that fits."""
    for unit in ("s", "ms"):
        if seconds >= 1 or (unit == "ms" and seconds >= 1e-3):
            return f"{seconds * (1 if unit == 's' else 1e3):.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
