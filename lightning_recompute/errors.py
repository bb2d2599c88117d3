"""The errors that have a name of their own."""


class RecomputeError(RuntimeError):
    """Found while training: a replay cannot give, or did not give, what the forward gave."""


class BudgetError(ValueError):
    """No choice keeps the memory budget.

    Args:
        message: Why.
        smallest_bytes: The smallest peak that there is a choice for, where it is known.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
