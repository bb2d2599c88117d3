"""What reports share: contexts around methods in any order, CSV, and a report that leaves nothing."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback

from lightning_recompute.callbacks import MemoryReport, ThroughputReport
from lightning_recompute.files import csv_text
from lightning_recompute.reporting import enter_around


class Owner:
    """Something with methods."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def run(self, word: str) -> str:
        self.log.append(word)
        if word == "fail":
            raise ArithmeticError
        return word


def context(log: list[str], mark: str) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        log.append(f"{mark}({name}")
        try:
            yield
        finally:
            log.append(f"{mark})")

    return around


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "in reverse"])
def test_contexts_around_a_method_nest_and_leave_in_any_order(order: tuple[int, int]) -> None:
    owner = Owner()
    undos = [enter_around(owner, ["run"], context(owner.log, mark)) for mark in "ab"]
    assert owner.run("x") == "x"
    assert owner.log == ["a(run", "b(run", "x", "b)", "a)"]
    with pytest.raises(ArithmeticError):
        owner.run("fail")
    assert owner.log[-5:] == ["a(run", "b(run", "fail", "b)", "a)"]
    undos[order[0]]()
    undos[order[0]]()
    owner.log.clear()
    owner.run("y")
    assert owner.log == [f"{'ab'[order[1]]}(run", "y", f"{'ab'[order[1]]})"]
    undos[order[1]]()
    assert vars(owner).keys() == {"log"}


def test_a_patch_of_somebody_else_is_kept() -> None:
    owner = Owner()
    theirs = owner.run = lambda word: f"theirs {word}"  # type: ignore[method-assign]  # what others do
    undo = enter_around(owner, ["run"], context(owner.log, "a"))
    assert owner.run("x") == "theirs x"
    undo()
    assert owner.run is theirs

    undo = enter_around(owner, ["run"], context(owner.log, "a"))
    inner = owner.run
    later = owner.run = lambda word: f"later {inner(word)}"  # type: ignore[method-assign]
    undo()
    owner.log.clear()
    assert owner.run is later
    assert owner.run("x") == "later theirs x"
    assert owner.log == []


def test_csv_has_empty_fields_for_what_is_not_known() -> None:
    rows = [{"a": 1, "b": None}, {"a": 0.25, "b": 12345678901234567}]
    assert csv_text(["a", "b"], rows) == "a,b\n1,\n0.25,12345678901234567\n"
    assert csv_text(["a", "b"], []) == "a,b\n"


@pytest.mark.parametrize("report", [MemoryReport(reset_peak=False), ThroughputReport(1e12, 7, print_table=False)])
def test_reports_are_copied_and_pickled(report: Callback) -> None:
    for twin in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert type(twin) is type(report)
        differing = {name for name, value in vars(report).items() if vars(twin)[name] != value}
        assert differing == {"_cleanup"}
        twin.on_exception(None, None, KeyboardInterrupt())  # works without a run


@pytest.mark.parametrize(
    ("kind", "arguments", "due"),
    [
        (MemoryReport, ["--report.print_table=false"], {"print_table": False, "reset_peak": True}),
        (ThroughputReport, ["--report.peak_flops=1e12", "--report.tokens_per_sample=128"], {"peak_flops": 1e12}),
        (ThroughputReport, ["--report.batch_size=builtins.len", "--report.warmup_steps=0"], {"batch_size": len}),
    ],
)
def test_reports_are_made_from_the_command_line(
    kind: type[Callback], arguments: list[str], due: dict[str, object]
) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "report")
    report = parser.instantiate_classes(parser.parse_args(arguments)).report
    assert {name: vars(report)[name] for name in due} == due
    assert all(action.help for action in parser._actions if action.dest.startswith("report."))
