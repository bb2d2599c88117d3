"""The errors that have a name of their own."""


class RecomputeError(RuntimeError):
    """Found while training: a replay cannot give, or did not give, what the forward gave."""


class BudgetError(ValueError):
    """No choice keeps the memory budget."""
