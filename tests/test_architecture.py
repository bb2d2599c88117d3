"""Laws of the house, each with a proof that it can be broken."""

from __future__ import annotations

from pathlib import Path

import architecture as law
import pytest

import lightning_recompute

ROOT = Path(__file__).parent.parent
SOURCES = {path.stem: path.read_text() for path in (ROOT / "lightning_recompute").glob("*.py")}
FOLDERS = ("lightning_recompute", "tests", "bench", "examples")
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

TORCH_FREE = {
    "cost",
    "division",
    "errors",
    "files",
    "folders",
    "label_search",
    "paper_formulas",
    "path_program",
    "pipeline_layout",
    "pipeline_settings",
    "plan",
    "planner",
    "policy",
    "rank_solver",
    "schedule_actions",
    "schedules",
    "stage_memory",
    "stage_plans",
    "stage_split",
    "step_time",
    "units",
    "version",
}
HOOK_OWNERS = {"frame", "discard"}
FACING_LIGHTNING = {
    "budgeting",
    "callbacks",
    "checkpointing_strategy",
    "cli",
    "command_config",
    "compare_command",
    "data",
    "first_batch",
    "first_step",
    "gpt",
    "grouped_strategy",
    "inspect_command",
    "lightning_private",
    "memory_report",
    "out_of_memory",
    "piped_strategy",
    "pipeline_command",
    "pipeline_overview",
    "plan_command",
    "recompute_callback",
    "reporting",
    "session",
    "signal_to_end",
    "strategy",
    "throughput_report",
}
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
# parts of the engine that are tested through it, and others without a file of their own
COVERED_BY = {
    "agreement": "test_planning_groups.py",
    "balanced_split": "test_stage_profile.py",
    "calls": "test_recompute_inputs.py",
    "callbacks": "test_memory_report.py",
    "command_config": "test_compare_command.py",
    "errors": "test_recompute_state.py",
    "first_batch": "test_pipeline_command.py",
    "first_step": "test_inspect_command.py",
    "first_values": "test_pipeline.py",
    "frame": "test_recompute_backward.py",
    "gathered_linear": "test_collectives.py",
    "grouped_step": "test_planning_groups.py",
    "last_words": "test_piped_strategy.py",
    "lightning_private": "test_lightning_traps.py",
    "lone_block": "test_inspection.py",
    "measured_model": "test_staged_model.py",
    "overview": "test_plan_command.py",
    "ownership": "test_stages.py",
    "parallel": "test_tensor_parallel.py",
    "plan_words": "test_strategy.py",
    "peers": "test_sharded_checkpoint.py",
    "pipeline_confirm": "test_pipeline_command.py",
    "pipeline_costs": "test_staged_model.py",
    "pipeline_overview": "test_pipeline_command.py",
    "piped_fit": "test_piped_strategy.py",
    "pipeline_evaluation": "test_pipeline.py",
    "pipeline_step": "test_pipeline.py",
    "printing": "test_inspect_command.py",
    "rank_solver": "test_stage_plans.py",
    "rank_stream": "test_tensor_parallel.py",
    "recompute": "test_recompute_names.py",
    "recompute_unit": "test_recompute_units.py",
    "reduction": "test_data_parallel.py",
    "saved_states": "test_checkpoint_loading.py",
    "replicas": "test_shard_placement.py",
    "repeated_work": "test_reports_groups.py",
    "session": "test_strategy.py",
    "shard_choice": "test_data_parallel.py",
    "sharding": "test_data_parallel.py",
    "shared_attributes": "test_piped_users.py",
    "shared_metrics": "test_piped_strategy.py",
    "step_form": "test_probe.py",
    "step_log": "test_piped_strategy.py",
    "step_memory": "test_plan_command.py",
    "split_memory": "test_stage_profile.py",
    "stage_budget": "test_stage_profile.py",
    "stage_forecast": "test_stage_profile.py",
    "stage_search": "test_stage_profile.py",
    "stragglers": "test_planning_groups.py",
    "tensor_styles": "test_tensor_parallel.py",
    "tried_step": "test_planning_groups.py",
    "trials": "test_compare_command.py",
    "version": "test_package.py",
    "vocabulary": "test_collectives.py",
}


def test_there_is_something_to_judge() -> None:
    assert {"plan", "policy", "blocks", "recompute", "frame", "strategy", "gpt"} <= set(SOURCES)
    assert set(SOURCES) == {path.stem for path in Path(lightning_recompute.__file__).parent.glob("*.py")}


# ---- imports


def test_imports_only_go_down() -> None:
    assert law.in_cycles(SOURCES) == set()


def test_the_floors_of_the_pillars() -> None:
    floor = law.floors(law.own_imports(SOURCES))
    assert floor["files"] == 0
    assert floor["plan"] < floor["policy"] < floor["recompute"] < floor["strategy"]
    assert floor["frame"] < floor["recompute"]


def test_plans_and_costs_have_no_torch() -> None:
    assert law.reaching(SOURCES, TORCH_FREE, ("torch", "torchmetrics", "transformers", *LIGHTNING)) == set()


def test_only_some_modules_face_lightning() -> None:
    assert law.importers(SOURCES, LIGHTNING) <= FACING_LIGHTNING
    # nor do others through them: the engine works without Lightning
    assert law.reaching(SOURCES, set(SOURCES) - FACING_LIGHTNING - {"__init__"}, LIGHTNING) == set()


def test_lightnings_private_names_are_in_one_place() -> None:
    assert law.private_lightning(SOURCES) <= {"lightning_private", "signal_to_end"}


def test_only_the_engine_touches_saved_tensor_hooks() -> None:
    assert law.users_of(SOURCES, "saved_tensors_hooks") == HOOK_OWNERS


def test_transformers_is_no_dependency() -> None:
    assert law.importers(SOURCES, ("transformers",)) == set()


# ---- reading


def test_no_file_is_too_long() -> None:
    assert law.too_long(TEXTS) == {}


def test_everything_public_says_what_it_is() -> None:
    assert law.without_docstring(SOURCES) == []


def test_only_the_command_line_prints() -> None:
    assert law.callers_of(SOURCES, "print") <= {"cli", "report"}


def test_what_the_package_exports() -> None:
    assert law.wrong_exports(SOURCES["__init__"]) == []
    for name in lightning_recompute.__all__:
        assert getattr(lightning_recompute, name) is not None


def test_every_module_has_its_tests() -> None:
    tests = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    assert law.untested(SOURCES, tests, COVERED_BY) == []


# ---- each law can be broken

TORCH = "import torch"


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("import a.b as c", {"a.b"}),
        ("from a.b import c, d", {"a.b.c", "a.b.d"}),
        ("def f():\n    from a import b", {"a.b"}),
        ("if TYPE_CHECKING:\n    import a", {"a"}),
        ("from . import x\nfrom .y import z", {"lightning_recompute.x", "lightning_recompute.y.z"}),
        ("import importlib\nimportlib.import_module('a.b')", {"importlib", "a.b"}),
        ("__import__('a')", {"a"}),
        ("'import a'", set()),
    ],
)
def test_all_ways_to_import_are_seen(text: str, due: set[str]) -> None:
    assert law.imports(text) == due


def test_cycles_are_seen() -> None:
    down = {"a": "from lightning_recompute.b import x", "b": "from lightning_recompute import c", "c": ""}
    assert law.floors(law.own_imports(down)) == {"c": 0, "b": 1, "a": 2}
    assert law.in_cycles(down) == set()
    assert law.in_cycles({**down, "c": "def f():\n    import lightning_recompute.a"}) == {"a", "b", "c"}
    assert law.in_cycles({"a": "from lightning_recompute.a import x"}) == {"a"}


def test_importing_the_package_itself_is_a_cycle() -> None:
    sources = {"__init__": "from lightning_recompute.a import x", "a": "from lightning_recompute import y"}
    assert law.in_cycles(sources) == {"__init__", "a"}


def test_torch_is_seen_through_others() -> None:
    sources = {"plan": "from lightning_recompute.files import x", "files": "", "frame": TORCH}
    assert law.reaching(sources, {"plan", "planner"}, ("torch",)) == set()
    for text in (TORCH, "from torch import nn", "def f():\n    import torch.nn", "import lightning_recompute.frame"):
        assert law.reaching({**sources, "files": text}, {"plan", "planner"}, ("torch",)) == {"plan"}


def test_private_names_of_lightning_are_seen() -> None:
    assert (
        law.private_lightning({"a": "from lightning.pytorch import Trainer\ntrainer.strategy\nself._trainer.x"})
        == set()
    )
    for text in (
        "from lightning.pytorch.trainer import _something",
        "from pytorch_lightning._x import y",
        "self.trainer._results",
        "trainer._logger_connector.log()",
    ):
        assert law.private_lightning({"a": text}) == {"a"}


@pytest.mark.parametrize(
    "text",
    [
        "from torch.autograd.graph import saved_tensors_hooks",
        "from torch.autograd.graph import saved_tensors_hooks as hooks",
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack)",
    ],
)
def test_uses_are_seen(text: str) -> None:
    assert law.users_of({"a": text, "b": "'saved_tensors_hooks'  # saved_tensors_hooks"}, "saved_tensors_hooks") == {
        "a"
    }


def test_calls_are_seen() -> None:
    quiet = "console.print(x)\n'print(x)'\nprint = 3"
    assert law.callers_of({"a": quiet, "b": "def f():\n    print(1)"}, "print") == {"b"}


def test_missing_docstrings_are_seen() -> None:
    text = '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""\n    def _g(self): ...\ndef _h(): ...'
    assert law.without_docstring({"a": text}) == []
    assert law.without_docstring({"a": text.replace('"""M."""', "")}) == ["a"]
    assert law.without_docstring({"a": text.replace('"""A."""', "x = 1")}) == ["a.A"]
    assert law.without_docstring({"a": text.replace('"""F."""', "...")}) == ["a.A.f"]


def test_long_files_are_seen() -> None:
    assert law.too_long({"a": "\n" * 400, "b": "\n" * 401}) == {"b": 401}


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ('from lightning_recompute.a import B\n__all__ = ["B"]', []),
        ("from lightning_recompute.a import B\n__all__ = []", ["B is not listed"]),
        ('from torch import nn\n__all__ = ["nn"]', ["nn is listed and not there"]),
        (
            'from lightning_recompute.a import Block, MAX, find\n__all__ = ["Block", "MAX", "find"]',
            ["the order is ['MAX', 'Block', 'find']"],
        ),
        ('from lightning_recompute.a import B, c\n__all__ = ["c", "B"]', ["the order is ['B', 'c']"]),
        ('from lightning_recompute.a import B\n__all__ = ["B", "B"]', ["the order is ['B']"]),
        ("def f(): ...\n__all__ = []", ["f is not listed"]),
    ],
)
def test_wrong_exports_are_seen(text: str, due: list[str]) -> None:
    assert law.wrong_exports(text) == due


def test_missing_tests_are_seen() -> None:
    sources = {"__init__": "", "plan": "", "calls": ""}
    assert law.untested(sources, ["test_plan.py", "test_x.py"], {"calls": "test_x.py"}) == []
    assert law.untested(sources, ["test_plan.py", "test_x.py"], {}) == ["calls: test_calls.py"]
    assert law.untested(sources, ["test_plan.py"], {"calls": "test_x.py"}) == ["calls: test_x.py"]
    assert law.untested({"plan": ""}, ["test_plan.py"], {"old": "test_plan.py"}) == ["old is listed and gone"]
    assert law.untested({"plan": ""}, ["test_plan.py"], {"plan": "test_plan.py"}) == ["plan has its own file"]
