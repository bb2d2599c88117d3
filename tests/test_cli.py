"""The command line: commands, interpolation, help, and one message for each mistake."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_modules import MODULES
from omegaconf import OmegaConf

import lightning_recompute
from lightning_recompute import session
from lightning_recompute.cli import PROGRAM, main

Edit = Callable[[dict[str, Any]], None]

STRATEGY = "lightning_recompute.RecomputeStrategy"
SHORT = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}


def config() -> dict[str, Any]:
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "strategy": {"class_path": STRATEGY, "init_args": {"granularity": "full"}},
            **SHORT,
        },
        "model": {
            "class_path": "lightning_recompute.GPT",
            "init_args": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_length": 16},
        },
        "data": {
            "class_path": "lightning_recompute.TextDataModule",
            "init_args": {"length": "${model.init_args.max_length}", "max_bytes": 20_000, "batch_size": 2},
        },
    }


@pytest.fixture(autouse=True)
def _own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What main() does to its process ends with the test."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "project", raising=False)
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(name) for name in ("lightning_recompute", "lightning.pytorch.utilities.rank_zero")]
    before = [(log, log.level, [*log.handlers], [*log.filters]) for log in loggers]
    with warnings.catch_warnings():
        yield
    for log, level, handlers, filters in before:
        log.setLevel(level)
        log.handlers, log.filters = handlers, filters


def write(edit: Edit | None = None) -> None:
    content = config()
    if edit is not None:
        edit(content)
    OmegaConf.save(OmegaConf.create(content), "c.yaml")


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is refused; its one message."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capfd.readouterr()
    assert left.value.code == 2
    assert "Traceback" not in said.err
    before, _, message = said.err.partition("error: ")
    # nothing but what Lightning says of the machine
    assert not re.search("usage|error", before)
    assert "error: " not in message
    return message.strip()


def strategy(**entry: Any) -> Edit:
    return lambda content: content["trainer"].update(strategy={"class_path": STRATEGY, **entry})


def words(**arguments: Any) -> Edit:
    return strategy(init_args=arguments)


def trainer(**arguments: Any) -> Edit:
    return lambda content: content["trainer"].update(arguments)


def model(**arguments: Any) -> Edit:
    return lambda content: content["model"]["init_args"].update(arguments)


# case 59, (a) to (f), and their kin
IN_THE_FILE = {
    "a list": (
        trainer(strategy=[{"class_path": STRATEGY}]),
        f"trainer.strategy: found a list; one Strategy is due, without the dash:\n  class_path: {STRATEGY}",
    ),
    "beside class_path": (
        strategy(granularity="full"),
        "trainer.strategy: found 'granularity' beside class_path; arguments go under init_args:\n"
        f"  class_path: {STRATEGY}\n  init_args:\n    granularity: full",
    ),
    "a wrong word": (
        words(granularity="ful"),
        "trainer.strategy.init_args.granularity: found 'ful'; 'full', 'selective' or null is due; did you mean 'full'?",
    ),
    "an unknown argument": (
        words(recompute_num_layer=2),
        "trainer.strategy: RecomputeStrategy has no argument 'recompute_num_layer'; did you mean 'num_layers'? "
        "It takes: granularity, method, num_layers, modules,",
    ),
    "a fraction": (
        words(num_layers=2.5),
        "trainer.strategy.init_args.num_layers: found 2.5; a whole number or null is due",
    ),
    "a bare class path": (
        trainer(strategy=STRATEGY),
        f"trainer.strategy: found '{STRATEGY}', a class path as a plain string; this form is due:\n  strategy:\n"
        f"    class_path: {STRATEGY}\n    init_args: {{}}\nor one of the names: recompute,",
    ),
    "a name that is none": (
        trainer(strategy="recompue"),
        "trainer.strategy: there is no strategy named 'recompue'; did you mean 'recompute'?",
    ),
    "a class that is none": (
        trainer(strategy={"class_path": "lightning_recompute.RecomputeStrateg"}),
        "trainer.strategy: lightning_recompute has no class 'RecomputeStrateg'; did you mean 'RecomputeStrategy'?",
    ),
    "no list": (
        words(granularity="selective", modules="mlp"),
        "trainer.strategy.init_args.modules: found 'mlp'; a list of str or null is due; write [mlp]",
    ),
    "a wrong pair": (
        words(granularity="selective", method="block"),
        "RecomputeStrategy: method='block' with granularity='selective': method says how whole blocks are grouped",
    ),
    "plan and words": (words(plan="p.yaml", num_layers=2), "RecomputeStrategy: plan and num_layers=2: a plan says it"),
    "no such plan": (words(plan="p.yaml"), "RecomputeStrategy: "),
    "a callback's argument": (
        trainer(callbacks=[{"class_path": "lightning_recompute.Recompute", "init_args": {"method": "blok"}}]),
        "trainer.callbacks.init_args.method: found 'blok'; 'uniform', 'block' or null is due; did you mean 'block'?",
    ),
    "a Trainer's argument": (
        trainer(max_epoch=3),
        "there is no option 'trainer.max_epoch'; did you mean 'max_epochs'?",
    ),
    "a model's argument": (model(num_layer=3), "model: GPT has no argument 'num_layer'; did you mean 'num_layers'?"),
    "a model's value": (model(num_heads=3), "GPT: num_heads=3 does not divide hidden_size=16"),
    "an interpolation": (
        model(max_length="${model.init_args.max_lenth}"),
        "model.init_args.max_length: Interpolation key '.max_lenth' not found",
    ),
    "no model": (lambda content: (content.pop("model"), content.pop("data")), "there is no model"),
    "no Trainer": (lambda content: content.update(trainer=[1]), "trainer: found [1]; a mapping"),
    "an accelerator that is none": (
        trainer(accelerator="quantum"),
        "You selected an invalid accelerator name: `accelerator='quantum'`",
    ),
}


@pytest.mark.parametrize("case", IN_THE_FILE)
def test_a_mistake_in_the_file_ends_in_one_message(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    edit, message = IN_THE_FILE[case]
    write(edit)
    assert refusal(capfd, "fit", "--config", "c.yaml").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--trainer.strategy.granularity=ful", "trainer.strategy.init_args.granularity: found 'ful'"),
        ("--trainer.strategy.num_layer=2", "trainer.strategy: RecomputeStrategy has no argument 'num_layer'"),
        ("--modle.x=2", "there is no option 'modle.x'; did you mean 'model'?"),
        ("--config=nowhere.yaml", "config: File does not exist: "),
        ("--ckpt_path=nowhere.ckpt", "Checkpoint file not found: nowhere.ckpt"),
    ],
    ids=str,
)
def test_a_mistake_on_the_command_line(arguments: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    write()
    assert refusal(capfd, "fit", "--config", "c.yaml", arguments).startswith(message)


def test_wrong_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert "{fit,validate,test,predict" in refusal(capfd)
    assert "'fit', 'validate', 'test', 'predict'" in refusal(capfd, "fitt")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (words(num_layers=9), "num_layers=9, but the largest list or stage has 2 block(s): 1..2 is due"),
        (
            words(blocks="modle.layers"),
            "blocks='modle.layers' is neither a path nor a class in the model; known: blocks",
        ),
        (words(offload_saved_activations=True), "offload_saved_activations"),
        (
            trainer(callbacks=[{"class_path": "lightning_recompute.Recompute"}]),
            "RecomputeStrategy and the callback Recompute in one Trainer",
        ),
        (lambda content: content["data"]["init_args"].update(path="nowhere"), "found neither file nor folder at"),
    ],
    ids=range(5),
)
def test_what_fit_refuses_ends_in_one_message(edit: Edit, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    write(edit)
    assert message in refusal(capfd, "fit", "--config", "c.yaml").splitlines()[0]


# ---- what is no mistake in the arguments keeps its traceback


def users_module(**arguments: Any) -> Edit:
    Path("project.py").write_text(MODULES)

    def edit(content: dict[str, Any]) -> None:
        content.update(model={"class_path": "project.Net", "init_args": arguments})
        del content["data"]

    return edit


def test_modules_are_found_where_the_command_is_given(capfd: pytest.CaptureFixture[str]) -> None:
    write(users_module())
    main(["fit", "--config", "c.yaml"])
    said = capfd.readouterr()
    assert "Recompute: blocks (3 x Sequential): blocks 0-2 full, one by one" in said.err
    assert "Epoch 0, step 2: val_score 0" in said.out


@pytest.mark.parametrize(("fault", "text"), [("step", "user's own step"), ("constructor", "nothing")])
def test_a_fault_in_the_users_code_keeps_its_traceback(fault: str, text: str) -> None:
    write(users_module(fault=fault))
    with pytest.raises((ValueError, AttributeError)) as raised:
        main(["fit", "--config", "c.yaml"])
    files: set[str] = set()
    error: BaseException | None = raised.value
    while error is not None:
        files |= {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
        error = error.__cause__
    assert "project.py" in files
    assert text in str(raised.value)


def test_what_the_users_constructor_refuses_is_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    write(users_module(fault="refuses"))
    assert refusal(capfd, "fit", "--config", "c.yaml") == "Net: width=8 is too small; 16 is due"


@pytest.mark.parametrize("fault", [lambda *_, **__: int("x"), lambda *_, **__: [].index(1)])
def test_a_fault_of_ours_keeps_its_traceback(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when Python raises the type that refusals have."""
    write()
    monkeypatch.setattr(session, "apply_recompute", fault)
    with pytest.raises(ValueError, match=r"invalid literal|not in list"):
        main(["fit", "--config", "c.yaml"])


def test_a_process_that_fails_says_so() -> None:
    write(users_module(fault="step"))
    program = Path(sys.executable).with_name(PROGRAM)
    arguments = ("fit", "--config", "c.yaml")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a mistake in the user's own step" in done.stderr


@pytest.mark.long
def test_two_processes_refuse_with_one_voice() -> None:
    program = Path(sys.executable).with_name(PROGRAM)
    write(words(num_layers=9))
    arguments = ("fit", "--config", "c.yaml", "--trainer.devices=2")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert done.stderr.count("error: num_layers=9") == 1
    assert "Traceback" not in done.stderr


# ---- what works


@pytest.mark.parametrize("value", ["recompute", "RecomputeStrategy", "auto"])
def test_a_strategy_by_its_name_alone(value: str) -> None:
    """Case 59 (g)."""
    write(trainer(strategy=value))
    main(["fit", "--config", "c.yaml"])
    assert Path("plan.yaml").exists() == (value != "auto")


def test_an_interpolation_follows_what_the_command_line_changes() -> None:
    write()
    main(["fit", "--config", "c.yaml", "--model.max_length=8"])
    saved = OmegaConf.load("config.yaml")
    assert saved.data.init_args.length == saved.model.init_args.max_length == 8
    # and a second run in the same folder writes its own
    main(["fit", "--config", "c.yaml"])
    assert OmegaConf.load("config.yaml").data.init_args.length == 16
    # the saved config is one
    main(["fit", "--config", "config.yaml"])


def test_fit_validate_test_predict(capfd: pytest.CaptureFixture[str]) -> None:
    write()
    main(["fit", "--config", "c.yaml", "--trainer.enable_checkpointing=true"])
    (checkpoint,) = Path("checkpoints").glob("*.ckpt")
    torch.load(checkpoint, weights_only=True)
    for command, metric in (("validate", "val_perplexity"), ("test", "test_perplexity"), ("predict", "")):
        capfd.readouterr()
        main([command, "--config", "c.yaml", f"--ckpt_path={checkpoint}"])
        assert metric in capfd.readouterr().out


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capfd.readouterr().out.split() == [PROGRAM, lightning_recompute.__version__]


def helped(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    assert left.value.code == 0
    return capfd.readouterr().out


def test_help_tells_the_commands_and_where_more_is(capfd: pytest.CaptureFixture[str]) -> None:
    text = helped(capfd, "--help")
    assert all(word in text for word in ("fit", "validate", "test", "predict", "--version"))
    asked = re.findall(rf"^  {PROGRAM} (.*?)(?:   .*)?$", text, flags=re.MULTILINE)
    assert len(asked) >= 4
    for line in asked:
        assert helped(capfd, *line.split())


OURS = {
    "--trainer.strategy.help": ("RecomputeStrategy",),
    "--trainer.callbacks.help": ("Recompute", "MemoryReport", "ThroughputReport"),
    "--model.help": ("GPT",),
    "--data.help": ("TextDataModule",),
}
CLASSES = [(option, name) for option, names in OURS.items() for name in names]


@pytest.mark.parametrize(("option", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_help_explains_every_argument(option: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = helped(capfd, "fit", option, name)
    entries = re.split(r"^  (?=--)", text, flags=re.MULTILINE)[1:]
    documented = {}
    for entry in entries:
        head, _, rest = " ".join(entry.split()).partition(" ")
        documented[head.split("=")[0].rpartition(".")[2].strip("+")] = rest
    for argument in inspect.signature(getattr(lightning_recompute, name)).parameters:
        # after the metavariable, more than the type and the default in brackets
        assert len(re.sub(r"\(.*?\)", "", documented[argument]).split()) > 4, (argument, documented[argument])
