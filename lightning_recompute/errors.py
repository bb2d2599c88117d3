"""The error of what is found while training."""


class RecomputeError(RuntimeError):
    """Found while training: a replay cannot give, or did not give, what the forward gave."""
