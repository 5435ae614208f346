"""`KroneckerProduct`: a lazy linear operator whose algebra is done factor by factor."""


class KroneckerProduct:
    """The Kronecker product of factors, never built."""
