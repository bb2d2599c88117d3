"""Plans as values: what they accept, what they refuse and say, and that a file holds the same value."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import rich.console
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import containing
from plans import PLANS

from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Segment, Selective

PLACEMENTS = st.sampled_from(["device", "shard", "host"])
# anything a yaml file has to quote; "${" starts an interpolation of OmegaConf's grammar and is in no module's name
WORDS = st.one_of(
    st.sampled_from(["core_attn", "*.mlp", "*.[am]lp", "yes", "null", "~", "1", "1e3", "0x1F", "1:20", "- a", "a: b"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="$"), min_size=1, max_size=6),
)
ACTIONS = st.one_of(
    st.just(Keep()),
    st.builds(Full, inputs=PLACEMENTS),
    st.builds(Selective, st.lists(WORDS, min_size=1, max_size=3), inputs=PLACEMENTS),
    st.builds(SaveOps, st.lists(WORDS, min_size=1, max_size=3), inputs=PLACEMENTS),
)


@st.composite
def any_plan(draw: st.DrawFn) -> RecomputePlan:
    segments, start = [], 0
    for length, action in draw(st.lists(st.tuples(st.integers(1, 5), ACTIONS), min_size=1, max_size=6)):
        segments.append(Segment(start, start + length, action))
        start += length
    return RecomputePlan(tuple(segments))


MIXED = RecomputePlan(
    (
        Segment(0, 2, Full(inputs="host")),
        Segment(2, 3, Selective(("norm", "*.mlp"), inputs="shard")),
        Segment(3, 6, SaveOps(("matmul", "aten.relu"))),
        Segment(6, 8, Keep()),
    )
)


# ---- values


def test_equal_by_value_and_hashable() -> None:
    twin = RecomputePlan(tuple(Segment(s.start, s.stop, copy.deepcopy(s.action)) for s in MIXED.segments))
    assert twin == MIXED
    assert hash(twin) == hash(MIXED)
    assert len({twin, MIXED}) == 1


@pytest.mark.parametrize(
    "other",
    [
        RecomputePlan((Segment(0, 2, Full()),)),
        RecomputePlan((Segment(0, 1, Full()), Segment(1, 3, Full()))),
        RecomputePlan((Segment(0, 3, Full(inputs="host")),)),
        RecomputePlan((Segment(0, 3, Keep()),)),
        RecomputePlan((Segment(0, 3, SaveOps()),)),
    ],
)
def test_different_plans_differ(other: RecomputePlan) -> None:
    assert other != RecomputePlan((Segment(0, 3, Full()),))


def test_a_list_of_segments_and_names_makes_the_same_value_as_tuples() -> None:
    action = Selective(["mlp"])  # type: ignore[arg-type]
    assert RecomputePlan([Segment(0, 1, action)]) == RecomputePlan((Segment(0, 1, Selective(("mlp",))),))  # type: ignore[arg-type]


def test_a_single_name_is_one_name_and_not_its_letters() -> None:
    assert Selective("mlp").modules == ("mlp",)  # type: ignore[arg-type]
    assert SaveOps("matmul").ops == ("matmul",)  # type: ignore[arg-type]


def test_values_cannot_be_changed() -> None:
    for value, name in [(MIXED, "segments"), (MIXED.segments[0], "stop"), (Full(), "inputs"), (SaveOps(), "ops")]:
        with pytest.raises(AttributeError):
            setattr(value, name, getattr(value, name))


def test_num_blocks_is_where_the_last_segment_stops() -> None:
    assert MIXED.num_blocks == 8
    assert RecomputePlan((Segment(0, 1, Keep()),)).num_blocks == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_and_pickles(copied: object) -> None:
    assert callable(copied)
    assert copied(MIXED) == MIXED


# ---- what is refused


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], ["Segment(0, L, Keep())"]),
        ([(1, 3)], ["Segment(1, 3)", "gap", "block 0"]),
        ([(0, 2), (3, 4)], ["Segment(3, 4)", "gap", "block 2", "Keep()"]),
        ([(0, 2), (1, 4)], ["Segment(1, 4)", "overlaps", "block 2"]),
        ([(0, 2), (0, 2)], ["Segment(0, 2)", "overlaps", "block 2"]),
        ([(0, 4), (2, 3)], ["Segment(2, 3)", "overlaps", "block 4"]),
        ([(2, 4), (0, 2)], ["Segment(2, 4)", "gap", "block 0"]),
    ],
)
def test_gaps_and_overlaps_name_the_segment(segments: list[tuple[int, int]], words: list[str]) -> None:
    with pytest.raises(ValueError, match=containing(*words)):
        RecomputePlan(tuple(Segment(start, stop, Full()) for start, stop in segments))


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 2), (3, 2), (-1, 2), (-2, -1)])
def test_a_segment_covers_blocks(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"Segment\({start}, {stop}\).*0 <= start < stop"):
        Segment(start, stop, Full())


@pytest.mark.parametrize("index", [0.0, 2.5, "1", None, True])
def test_block_indices_are_ints(index: object) -> None:
    with pytest.raises(TypeError, match="ints"):
        Segment(index, 9, Full())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ints"):
        Segment(0, index, Full())  # type: ignore[arg-type]


@pytest.mark.parametrize("action", ["full", None, Full, Keep, 3])
def test_an_action_is_an_action(action: object) -> None:
    with pytest.raises(TypeError, match=r"Keep\(\), Full\(\), Selective\(\) or SaveOps\(\)"):
        Segment(0, 1, action)  # type: ignore[arg-type]


def test_a_plan_consists_of_segments() -> None:
    with pytest.raises(TypeError, match=r"Segment\(start, stop, action\), found \(0, 1, Full"):
        RecomputePlan(((0, 1, Full()),))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Full, Selective, SaveOps])
@pytest.mark.parametrize("inputs", ["cpu", "", None, "Device"])
def test_inputs_live_in_one_of_three_places(kind: type[Full] | type[SaveOps], inputs: object) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(inputs={inputs!r}\).*'device', 'shard' or 'host'"):
        kind(inputs=inputs)  # type: ignore[arg-type]


def test_keep_has_no_inputs() -> None:
    with pytest.raises(TypeError, match="inputs"):
        Keep(inputs="host")  # type: ignore[call-arg]


@pytest.mark.parametrize("names", [(), [], "", ("mlp", "")])
def test_names_are_not_empty(names: object) -> None:
    with pytest.raises(ValueError, match=r"Selective\(modules=\.\.\.\)"):
        Selective(names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SaveOps\(ops=\.\.\.\)"):
        SaveOps(names)  # type: ignore[arg-type]


# a set has another order in each process, and ranks must agree on the plan
@pytest.mark.parametrize("names", [None, 3, {"mlp": 1}, {"mlp", "norm"}, [1], ["mlp", None]])
def test_names_are_a_list_of_strings(names: object) -> None:
    with pytest.raises(TypeError, match=r"Selective\(modules=\.\.\.\) takes a name or a list of names, found"):
        Selective(names)  # type: ignore[arg-type]


# ---- files


@settings(max_examples=30)
@given(plan=any_plan())
def test_a_file_holds_the_same_value(plan: RecomputePlan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    assert plan.save(path) == path
    assert RecomputePlan.load(path) == plan


@pytest.mark.parametrize("build", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("chunks", [(1,), (5,), (4, 3)])
def test_the_plans_of_the_other_tests_round_trip(build: object, chunks: tuple[int, ...], tmp_path: Path) -> None:
    assert callable(build)
    plan = build(chunks)
    assert RecomputePlan.load(plan.save(tmp_path / "plan.yaml")) == plan


def test_the_record_is_kept_beside_the_value(tmp_path: Path) -> None:
    record = {"torch": "2.13.0", "seed": 3, "note": "${no.such.key}"}
    path = MIXED.save(tmp_path / "plan.yaml", record=record)
    assert RecomputePlan.load(path) == MIXED
    text = path.read_text()
    assert "record:" in text
    assert "2.13.0" in text
    assert "record" not in MIXED.save(tmp_path / "bare.yaml").read_text()


def test_save_makes_folders_and_replaces_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "version_0" / "plan.yaml"
    RecomputePlan((Segment(0, 40, Full()),)).save(path)
    MIXED.save(str(path))
    assert RecomputePlan.load(str(path)) == MIXED
    assert list(path.parent.iterdir()) == [path]


def test_a_plan_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# first half whole\n"
        "segments:\n"
        "- {start: 0, stop: 2, action: full}\n"
        "- start: 2\n  stop: 3\n  action: selective\n  modules: mlp\n"
        "- {action: save_ops, stop: 4, start: 3, ops: [matmul, attention], inputs: host}\n"
        "- {start: 4, stop: 6, action: keep}\n"
    )
    assert RecomputePlan.load(path) == RecomputePlan(
        (
            Segment(0, 2, Full()),
            Segment(2, 3, Selective(("mlp",))),
            Segment(3, 4, SaveOps(("matmul", "attention"), inputs="host")),
            Segment(4, 6, Keep()),
        )
    )


def _one(rest: str) -> str:
    return f"segments: [{{start: 0, stop: 2, {rest}}}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no plan", "segments:"]),
        ("3", ["yaml"]),
        ("hello", ["no plan"]),
        ("[1, 2]", ["no plan"]),
        ("segments:", ["no plan"]),
        ("segments: 3", ["no plan"]),
        ("segments: {a: 1}", ["no plan"]),
        ("segment: []", ["no plan"]),
        ("segments: []", ["needs a segment"]),
        ("segments: [3]", ["start, stop and action", "found 3"]),
        ("segments: [null]", ["start, stop and action", "found None"]),
        ("segments: [{start: 0, stop: 2}]", ["start, stop and action", "{'start': 0, 'stop': 2}"]),
        (_one("action: ful"), ["'ful'", "keep, full, selective, save_ops"]),
        (_one("action: [full]"), ["['full']", "keep, full, selective, save_ops"]),
        (_one("action: null"), ["None", "keep, full, selective, save_ops"]),
        (_one("action: '${nope}'"), ["${nope}", "keep, full, selective, save_ops"]),
        (_one("action: full, input: host"), ["'full' takes ['inputs']", "['input']"]),
        (_one("action: full, modules: [mlp]"), ["'full' takes ['inputs']", "['modules']"]),
        (_one("action: selective, module: [mlp]"), ["['inputs', 'modules']", "['module']"]),
        (_one("action: keep, inputs: host"), ["'keep' takes no option", "['inputs']"]),
        (_one("action: full, 1: 2"), ["['1']"]),
        (_one("action: full, inputs: gpu"), ["'gpu'", "'device', 'shard' or 'host'"]),
        (_one("action: full, inputs: null"), ["None", "'device', 'shard' or 'host'"]),
        (_one("action: selective, modules: null"), ["modules", "None"]),
        (_one("action: selective, modules: []"), ["modules", "[]"]),
        (_one("action: selective, modules: {a: b}"), ["modules", "{'a': 'b'}"]),
        (_one("action: save_ops, ops: 3"), ["ops", "3"]),
        ("segments: [{start: '0', stop: 2, action: full}]", ["Segment('0', 2)", "ints"]),
        ("segments: [{start: 0, stop: 2.5, action: full}]", ["Segment(0, 2.5)", "ints"]),
        ("segments: [{start: true, stop: 2, action: full}]", ["ints"]),
        ("segments: [{start: 0, stop: 0, action: full}]", ["Segment(0, 0)", "covers no block"]),
        ("segments: [{start: 1, stop: 2, action: full}]", ["Segment(1, 2)", "gap"]),
        ("segments: [{start: 0, stop: 2, action: full}]\nextra: 1", ["['extra']", "'segments' and 'record'"]),
        ("segments: [{start: 0, stop: 2, action: full}\n x", ["yaml", "line 2"]),
        ("segments: []\nsegments: []", ["yaml", "duplicate key segments"]),
        ("a: b: c", ["yaml", "line 1"]),
        ("\tsegments: []", ["yaml"]),
        ("!!python/object/apply:os.system [true]", ["yaml"]),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=containing(path, *words)):
        RecomputePlan.load(path)


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    path.write_bytes(b"\xff\xfe\x00PK\x03\x04")
    with pytest.raises(ValueError, match=r"weights\.ckpt.*yaml"):
        RecomputePlan.load(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        RecomputePlan.load(tmp_path / "none.yaml")


# ---- print


def test_the_table_says_what_each_block_does() -> None:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in str(MIXED).splitlines() if line[0] == "│"]
    assert rows == [
        ["0..1", "1 of 2", "full", "all", "host"],
        ["2", "1", "selective", "norm, *.mlp", "shard"],
        ["3..5", "1 of 3", "save_ops", "all but matmul, aten.relu", "device"],
        ["6..7", "-", "keep", "nothing", "-"],
    ]


@settings(max_examples=40)
@given(plan=any_plan())
def test_every_plan_prints(plan: RecomputePlan) -> None:
    assert str(plan).count("\n") >= len(plan.segments) + 3


def test_patterns_with_brackets_are_printed_as_they_are() -> None:
    plan = RecomputePlan((Segment(0, 1, Selective(("*.[am]lp", "[bold]x", "y[/red]"))),))
    assert "*.[am]lp, [bold]x, y[/red]" in str(plan)


def test_a_notebook_gets_the_same_string(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(MIXED)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(MIXED) == expected
    assert "0..1" in expected


def test_no_colour_codes_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(MIXED)


@pytest.mark.parametrize(
    ("segment", "words"), [(Segment(3, 4, Keep()), "block 3"), (Segment(0, 4, Keep()), "blocks 0..3")]
)
def test_a_segment_in_words(segment: Segment, words: str) -> None:
    assert str(segment) == words


def test_actions_by_default() -> None:
    actions: list[Action] = [Full(), Selective(), SaveOps()]
    assert [getattr(action, "inputs", None) for action in actions] == ["device"] * 3
    assert Selective().modules == ("core_attn",)
    assert SaveOps().ops == ("matmul",)
