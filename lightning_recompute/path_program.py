"""The search for the fastest path within a capacity as a linear program, and as an integer one.

A variable says whether an arc is taken. Two kinds of rows: the arcs form one path from unit 0 to the end; and at each
unit, and at the head, what the arcs hold and reach keeps the capacity. Rows of bytes are divided by the capacity, or
else the solver's tolerances mean nothing.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from lightning_recompute.label_search import Arc, Arrival, Chain, Floats, Prices, free_of_charge

RELATIVE_GAP = 1e-4
# a limit of nodes, not of time: the same answer on a busy machine
_NODES = 50
# the solver may exceed a row by about 1e-6; then it is asked for a little less
_SLACKS = (0.0, 1e-5)


class PathProgram:
    """The program of one chain and capacity.

    Args:
        chain: The chain, of at least one unit.
        capacity_bytes: What the peak above static may be, at least 1.
    """

    def __init__(self, chain: Chain, capacity_bytes: int) -> None:
        self._chain = chain
        self._capacity = capacity_bytes
        self._arcs = [arc for arcs in chain.arcs for arc in arcs]
        self._largest_tick = max(1, *(abs(arc.ticks) for arc in self._arcs))
        self._times = np.array([arc.ticks for arc in self._arcs]) / self._largest_tick
        self._rows, self._room = self._byte_rows()
        self._flow, self._source = self._flow_rows()

    def _byte_rows(self) -> tuple[Floats, Floats]:
        chain = self._chain
        rows = np.zeros((chain.num_units + 1, len(self._arcs)))
        for column, arc in enumerate(self._arcs):
            rows[:, column] = chain.num_waiting * arc.held_bytes
            rows[arc.start, column] += arc.reach_bytes
            rows[arc.start + 1 :, column] += arc.held_bytes
        room = np.full(chain.num_units + 1, 1.0)
        room[-1] -= chain.head_bytes / self._capacity
        return rows / self._capacity, room

    def _flow_rows(self) -> tuple[Floats, Floats]:
        num_units = self._chain.num_units
        rows = np.zeros((num_units + 1, len(self._arcs)))
        for column, arc in enumerate(self._arcs):
            rows[arc.start, column] += 1
            rows[arc.stop, column] -= 1
        source = np.zeros(num_units + 1)
        source[0], source[-1] = 1, -1
        return rows, source

    def prices(self) -> Prices:
        """A bound on the time of every path within the capacity, from the duals of the linear program."""
        answer = linprog(
            self._times, A_ub=self._rows, b_ub=self._room, A_eq=self._flow, b_eq=self._source, method="highs-ds"
        )
        if answer.x is None or answer.status != 0:
            return free_of_charge(self._chain)
        # any duals not below zero give a bound; these give the best one
        duals = np.maximum(-answer.ineqlin.marginals, 0.0)
        of_all = ((self._times + duals @ self._rows) * self._largest_tick).tolist()
        each = iter(of_all)
        of_arcs = [[next(each) for _ in arcs] for arcs in self._chain.arcs]
        return Prices(of_arcs, float(duals @ self._room) * self._largest_tick)

    def solve(self) -> Arrival | None:
        """A path within the capacity whose time is within `RELATIVE_GAP` of the least, or None where none was found."""
        for slack in _SLACKS:
            path = self._integer_path(slack)
            if path is None:
                return None
            found = self._chain.arrival(path)
            if found.peak_bytes <= self._capacity:
                return found
        return None

    def _integer_path(self, slack: float) -> list[Arc] | None:
        answer = milp(
            self._times,
            integrality=np.ones(len(self._arcs)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(csr_array(self._rows), -np.inf, self._room - slack),
                LinearConstraint(csr_array(self._flow), self._source, self._source),
            ],
            options={"mip_rel_gap": RELATIVE_GAP, "node_limit": _NODES},
        )
        if answer.x is None:
            return None
        taken = {arc.start: arc for arc, value in zip(self._arcs, answer.x, strict=True) if value > 0.5}
        path: list[Arc] = []
        unit = 0
        while unit < self._chain.num_units:
            if unit not in taken:
                return None
            path.append(taken[unit])
            unit = taken[unit].stop
        return path
