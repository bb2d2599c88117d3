"""What jsonargparse says at length, in one message. The texts are those of its release 4.53."""

from __future__ import annotations

import textwrap

import pytest

from lightning_recompute.cli_messages import explain

STRATEGY = "lightning_recompute.strategy.RecomputeStrategy"


def union(subtypes: str, errors: list[str], found: str, kind: str = "dict") -> str:
    bullets = "\n".join("- " + error.replace("\n", "\n  ") for error in errors)
    return (
        f"Does not validate against any of the Union subtypes\nSubtypes: {subtypes}\nErrors:\n"
        f"{textwrap.indent(bullets, '  ')}\nGiven value type: <class '{kind}'>\nGiven value: {found}"
    )


def key(name: str, text: str) -> str:
    return f'Parser key "{name}":\n{textwrap.indent(text, "  ")}'


def strategy(*errors: str, found: str, kind: str = "dict") -> str:
    subtypes = "[<class 'str'>, <class 'lightning.pytorch.strategies.strategy.Strategy'>]"
    return key("trainer.strategy", union(subtypes, ["Expected a <class 'str'>", *errors], found, kind))


def in_class(text: str, class_path: str = STRATEGY) -> str:
    return f"Problem with given class_path '{class_path}':\n{textwrap.indent(text, '  ')}"


LITERAL = "[typing.Literal['full', 'selective'], <class 'NoneType'>]"
WRONG_WORD = key(
    "granularity",
    union(LITERAL, ["Expected a typing.Literal['full', 'selective']", "Expected a <class 'NoneType'>"], "ful", "str"),
)
INT = "[<class 'int'>, <class 'NoneType'>]"
NO_INT = ["Expected a <class 'int'>", "Expected a <class 'NoneType'>"]


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (
            strategy(in_class(WRONG_WORD), found="{'class_path': 'x.Y'}"),
            "trainer.strategy.init_args.granularity: found 'ful'; 'full', 'selective' or null is due; "
            "did you mean 'full'?",
        ),
        (
            strategy(in_class(key("num_layers", union(INT, NO_INT, "2.5", "float"))), found="{'class_path': 'x.Y'}"),
            "trainer.strategy.init_args.num_layers: found 2.5; a whole number or null is due",
        ),
        (
            key("trainer.max_epochs", union(INT, NO_INT, "many", "str")),
            "trainer.max_epochs: found 'many'; a whole number or null is due",
        ),
        (
            key("trainer.x", union("[list[str], <class 'bool'>]", ["Expected a <class 'bool'>"], "core_attn", "str")),
            "trainer.x: found 'core_attn'; a list of str or true or false is due; write [core_attn]",
        ),
        (
            "Parser key \"check\": Expected a <class 'bool'>. Got value: yess",
            "check: found 'yess'; true or false is due",
        ),
        ("Parser key \"config\": File does not exist: 'a.yaml'", "config: File does not exist: 'a.yaml'"),
        (
            strategy(in_class("No module named 'nopackage'", "nopackage.Y"), found="{'class_path': 'nopackage.Y'}"),
            "trainer.strategy: class_path 'nopackage.Y': No module named 'nopackage'",
        ),
        (
            strategy(
                in_class("module 'lightning_recompute.strategy' has no attribute 'RecomputeStrateg'"), found="{'a': 1}"
            ),
            "trainer.strategy: found a mapping without class_path (a); this form is due:\n"
            "  class_path: package.Strategy\n  init_args:\n    argument: value",
        ),
        (
            strategy(
                in_class("module 'lightning_recompute.strategy' has no attribute 'RecomputeStrateg'"),
                found="{'class_path': 'lightning_recompute.strategy.RecomputeStrateg'}",
            ),
            "trainer.strategy: lightning_recompute.strategy has no class 'RecomputeStrateg'; "
            "did you mean 'RecomputeStrategy'?",
        ),
        (
            strategy("Expected an instantiatable class", found="{'class_path': 'p.Y', 'granularity': 'full'}"),
            "trainer.strategy: found 'granularity' beside class_path; arguments go under init_args:\n"
            "  class_path: p.Y\n  init_args:\n    granularity: full",
        ),
        (
            strategy("Not a valid subclass of Strategy", found="[{'class_path': 'p.Y'}]", kind="list"),
            "trainer.strategy: found a list; one Strategy is due, without the dash:\n  class_path: p.Y",
        ),
        (
            union(
                "[<class 'str'>, <class 'lightning.pytorch.strategies.strategy.Strategy'>]",
                ["Expected a <class 'str'>", "num_layers=0: 1 up to the number of blocks is due"],
                f"Namespace(class_path='{STRATEGY}', init_args=Namespace(num_layers=0))",
                "jsonargparse._namespace.Namespace",
            ),
            "RecomputeStrategy: num_layers=0: 1 up to the number of blocks is due",
        ),
        (
            "Subcommand 'fit' does not accept option 'trainer.max_epoch'",
            "there is no option 'trainer.max_epoch'; did you mean 'max_epochs'?",
        ),
        (
            "unrecognized arguments: --modle.x=3",
            "there is no option 'modle.x'; did you mean 'model'?",
        ),
        (
            "the following arguments are required: fit.model",
            "there is no model; give one in the config or by --model CLASS",
        ),
        ("Something new\nin two lines", "Something new\nin two lines"),
        (
            "Does not validate against any of the Union subtypes\nbut in another form",
            "Does not validate against any of the Union subtypes\nbut in another form",
        ),
    ],
    ids=range(17),
)
def test_one_message(text: str, due: str) -> None:
    assert explain(text, ["trainer.max_epochs", "trainer.devices", "model", "data.x"]) == due


def test_an_unknown_argument_names_the_nearest_and_all() -> None:
    text = strategy(in_class("Option 'recompute_num_layer' is not accepted"), found=f"{{'class_path': '{STRATEGY}'}}")
    message = explain(text)
    assert message.startswith("trainer.strategy: RecomputeStrategy has no argument 'recompute_num_layer'; did you mean")
    assert "did you mean 'num_layers'? It takes: granularity, method, num_layers, modules" in message


def test_a_short_name_that_is_not_imported_names_the_nearest() -> None:
    import lightning_recompute.strategy  # noqa: F401

    text = strategy("Not a valid subclass of Strategy", found="{'class_path': 'RecomputeStrateg'}")
    assert explain(text) == (
        "trainer.strategy: no Strategy named 'RecomputeStrateg' is imported; did you mean 'RecomputeStrategy'?"
    )


def test_among_many_options_only_the_nearest_is_named() -> None:
    many = [f"trainer.option{index}" for index in range(50)]
    assert explain("unrecognized arguments: --trainer.q=1", many) == "there is no option 'trainer.q'"
    assert explain("unrecognized arguments: --zzz", [*many, "model"]) == (
        "there is no option 'zzz'; known: model, trainer."
    )
