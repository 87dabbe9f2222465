"""Imports run one way, and each wing needs only its own libraries (STYLE: "In our house")."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import workup

LIB = Path(workup.__file__).parent
MODULES = sorted(LIB.rglob("*.py"))
HEAVY = ("torch", "matplotlib", "seaborn", "ipywidgets", "papermill", "transformers", "lightning", "timm", "ray")


def dotted(path):
    return ".".join(path.relative_to(LIB.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path):
    """Every module a file imports, at its top or in a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def offenders(wing, forbidden):
    """``wing``'s files that import something below one of ``forbidden``."""
    found = {}
    for path in MODULES:
        if dotted(path).startswith(wing):
            bad = {n for n in imported(path) if any(n == f or n.startswith(f"{f}.") for f in forbidden)}
            found |= {dotted(path): bad} if bad else {}
    return found


LATER = {
    "workup.judge": (*HEAVY, "workup.measure", "workup.experiments", "workup.show", "workup.workload", "workup.study"),
    "workup.measure": ("workup.judge", "workup.experiments", "workup.show", "workup.study", "matplotlib", "seaborn"),
    "workup.experiments": ("workup.show", "matplotlib", "seaborn", "ipywidgets"),
    "workup.show": ("torch", "workup.measure", "workup.experiments", "workup.workload"),
    "workup.workloads": ("workup.judge", "workup.measure", "workup.experiments", "workup.show", "workup.study"),
}


@pytest.mark.parametrize("wing", LATER)
def test_a_wing_imports_nothing_that_stands_after_it(wing):
    assert offenders(wing, LATER[wing]) == {}


def test_only_the_command_line_and_the_notebooks_show_anything():
    showing = {dotted(path) for path in MODULES if any(n.startswith("workup.show") for n in imported(path))}
    assert {name for name in showing if not name.startswith("workup.show")} == {"workup.cli", "workup.running"}


def test_only_the_wing_that_draws_needs_a_drawing_library():
    drawing = {dotted(p) for p in MODULES if imported(p) & {"matplotlib", "matplotlib.pyplot", "seaborn"}}
    assert {name for name in drawing if not name.startswith("workup.show")} == set()


def test_judging_needs_numpy_and_pandas_alone():
    third = {n.split(".")[0] for p in MODULES if dotted(p).startswith("workup.judge") for n in imported(p)}
    assert third - set(sys.stdlib_module_names) - {"workup"} <= {"numpy", "pandas"}


def python(source):
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_importing_workup_imports_none_of_the_heavy_libraries():
    assert python(f"import sys, workup; print([n for n in {(*HEAVY, 'pandas')} if n in sys.modules])") == "[]"


def test_a_workload_can_be_loaded_without_a_drawing_library():
    look = "import sys; from workup import Workload, load, Study; load('digits-mlp')\n"
    assert python(f"{look}print([n for n in {HEAVY[1:]} if n in sys.modules])") == "[]"


def test_judging_runs_where_torch_is_absent():
    names = [dotted(p) for p in MODULES if dotted(p).startswith("workup.judge.")]
    source = (
        "import importlib, sys\nsys.modules['torch'] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "from workup.judge import stability\n"
        "print(stability.judge([2.0 - 0.001 * i for i in range(500)]).value)"
    )
    assert python(source) == "stable"


def test_library_code_does_not_print_but_for_progress():
    def prints(path):
        calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        return any(isinstance(f, ast.Name) and f.id == "print" for f in calls)

    assert {dotted(path) for path in MODULES if prints(path)} == {"workup.progress"}
