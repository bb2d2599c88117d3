"""The package as it is installed: version, files, command, dependencies, and what importing it does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import architecture as law
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import lightning_recompute
from lightning_recompute.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_recompute"
# imported, and brought by a requirement of ours: module -> (its distribution, what brings it)
BROUGHT = {
    "lightning_utilities": ("lightning-utilities", "lightning"),
    "numpy": ("numpy", "scipy"),
    "yaml": ("PyYAML", "omegaconf"),
}


def run(code: str, *, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, without network, by the backend that pip would call."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("lightning_recompute", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=source)
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


# ---- version


def test_one_version() -> None:
    assert lightning_recompute.__version__ == __version__
    assert importlib.metadata.version("lightning-recompute") == __version__
    assert str(Version(__version__)) == __version__


def test_the_version_is_read_without_torch() -> None:
    assert law.imports((PACKAGE / "version.py").read_text()) == set()


# ---- what is shipped


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    due = {f"lightning_recompute/{path.name}" for path in PACKAGE.iterdir() if path.suffix in (".py", ".cpp", ".typed")}
    assert {"lightning_recompute/py.typed", "lightning_recompute/cpualloc.cpp"} <= due
    assert names == due


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    text = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert f"Version: {__version__}\n" in text["METADATA"]
    assert "Requires-Python: >=3.10" in text["METADATA"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]
    assert "Apache License" in text["LICENSE"]
    assert "lightning-recompute = lightning_recompute.cli:main" in text["entry_points.txt"]


def test_the_sources_of_the_wheel_are_those_here(wheel: zipfile.ZipFile) -> None:
    for path in PACKAGE.glob("*.*"):
        if path.suffix in (".py", ".cpp"):
            assert wheel.read(f"lightning_recompute/{path.name}") == path.read_bytes(), path.name


def test_the_command_is_there() -> None:
    [command] = importlib.metadata.entry_points(group="console_scripts", name="lightning-recompute")
    assert callable(command.load())


# ---- dependencies


def requirements() -> dict[str, Requirement]:
    """Of the package itself, without extras."""
    given = map(Requirement, importlib.metadata.requires("lightning-recompute") or [])
    return {requirement.name: requirement for requirement in given if requirement.marker is None}


def test_every_library_that_is_imported_is_required() -> None:
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    imported = {module.split(".")[0] for text in sources for module in law.imports(text)}
    imported -= set(sys.stdlib_module_names) | {"lightning_recompute"}
    for name in sorted(imported - set(requirements())):
        assert name in BROUGHT, f"{name} is imported and not in pyproject.toml"
        distribution, by = BROUGHT[name]
        assert by in requirements()
        theirs = map(Requirement, importlib.metadata.requires(by) or [])
        assert any(requirement.name == distribution and requirement.marker is None for requirement in theirs)


def test_the_compromised_releases_are_refused() -> None:
    allowed = requirements()["lightning"].specifier
    assert [version for version in ("2.5.0", "2.6.2", "2.6.3") if version in allowed] == []
    assert [version for version in ("2.6.0", "2.6.1", "2.6.6") if version not in allowed] == []


def test_what_is_installed_is_what_is_pinned_and_allowed() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, requirement in requirements().items():
        assert name in pins, f"{name} is not in constraints.txt"
        assert pins[name] in requirement.specifier


# ---- importing

WATCHED = ("transformers", "matplotlib", "pytorch_lightning", "tensorboard", "pandas")
WATCH = f"""
import builtins, json, sys
real, found = builtins.__import__, []
def watch(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "")
    if name.split(".")[0] in {WATCHED!r} and importer.startswith("lightning_recompute"):
        found.append((importer, name))
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = watch
"""
IMPORT = """
import torch, lightning
def state():
    return [torch.initial_seed(), torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
            torch.cuda.is_initialized(), torch.get_rng_state().sum().item()]
before = state()
import lightning_recompute
for name in lightning_recompute.__all__:
    getattr(lightning_recompute, name)
print(json.dumps({"found": found, "same": before == state(), "pl": "pytorch_lightning" in sys.modules}))
"""


def test_importing_is_quiet_and_light(tmp_path: Path) -> None:
    """It prints nothing, touches no state of torch, and imports no heavy library of its own accord."""
    output = run(WATCH + IMPORT, cwd=tmp_path)
    assert json.loads(output) == {"found": [], "same": True, "pl": False}
    assert list(tmp_path.iterdir()) == []


def test_a_heavy_import_by_us_would_be_seen() -> None:
    ours = "exec('import pandas', {'__name__': 'lightning_recompute.x'})"
    others = "exec('import pandas', {'__name__': 'torchmetrics.x'})"
    code = f"sys.modules['pandas'] = sys\n{others}\n{ours}\nprint(json.dumps(found))"
    assert json.loads(run(WATCH + code)) == [["lightning_recompute.x", "pandas"]]
