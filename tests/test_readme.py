"""Every block of the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "yaml", "sh"}


def test_python_blocks_run(tmp_path: Path) -> None:
    """One fresh process a README: each block in a namespace of its own, in an empty folder."""
    script = tmp_path / "blocks.py"
    script.write_text(f"for block in {blocks('python')!r}:\n    exec(compile(block, 'README', 'exec'), {{}})\n")
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(blocks("python")) >= 5


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_build_a_trainer(text: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(Trainer, "trainer")
    config = parser.parse_object(OmegaConf.to_container(OmegaConf.create(text)))
    trainer = parser.instantiate_classes(config).trainer
    assert type(trainer.strategy).__name__ == "RecomputeStrategy"
    assert trainer.strategy.num_layers == 4


@pytest.mark.parametrize("line", [line for text in blocks("sh") for line in text.splitlines()])
def test_shell_lines_name_what_there_is(line: str) -> None:
    """make targets exist, configs, scripts and console commands too; what they do is tested elsewhere."""
    command, *rest = shlex.split(line)
    if command == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif command == "python":
        assert (ROOT / rest[0]).is_file()
    elif command == "lightning-recompute":
        assert rest[0] in {"fit", "validate", "test", "predict", "inspect"}
        assert all((ROOT / word).is_file() for word in rest if word.endswith(".yaml"))
    else:
        assert command == "pip"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
