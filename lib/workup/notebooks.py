"""The workbook's notebooks: where they are, and the parameters each declares.

A parameter is one line ``name: type = literal  # help`` of the cell tagged ``parameters``;
that line is the whole declaration.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workup.errors import ParameterError, nearest

BUDGETS = ("smoke", "standard", "thorough")
#: Where trials train (:mod:`workup.measure.executors`).
EXECUTORS = ("serial", "processes", "ensemble", "auto", "ray")
_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its type, default and help."""

    name: str
    type: type
    optional: bool
    default: Any
    help: str

    def check(self, value: Any, *, where: str) -> Any:
        """``value`` as this parameter's type; numbers given as strings are understood.

        Raises:
            ParameterError: it cannot be read as that type, or is a knob's number and not above zero.
        """
        if value is None and self.optional:
            return None
        try:
            if self.type is bool:
                return {"true": True, "false": False}[str(value).lower()]
            if self.type is str:
                return str(value)
            number = float(value) if not isinstance(value, bool) else None
            if number is None or number != number or (self.type is int and number != int(number)):
                raise ValueError
            if self.optional and not 0 < number < float("inf"):  # a knob
                raise ParameterError(f"{where}: {self.name}={number!r} must be positive and finite.")
            return self.type(number)
        except (TypeError, ValueError, KeyError, OverflowError):
            kind = {"int": "a whole number", "float": "a number", "bool": "True or False"}[self.type.__name__]
            raise ParameterError(f"{where}: parameter {self.name}={value!r} must be {kind}.") from None


def folder() -> Path:
    """The folder of the notebooks: in the repository, or inside an installed package."""
    package = Path(__file__).parent
    beside = package.parents[1] / "notebooks"
    return beside if beside.is_dir() else package / "_notebooks"


def project_root() -> Path:
    """The folder that relative workload and study paths start from.

    It is the current folder; inside the workbook's own ``notebooks`` folder, where Lab and
    nbmake run a kernel, it is the folder above, so that a path means the same everywhere.
    """
    here = Path.cwd()
    return here.parent if (here / "04_learning_rate.ipynb").exists() else here


def find(name: str) -> Path:
    """The notebook of that number or name: ``04``, ``04_learning_rate``.

    Raises:
        ParameterError: there is none.
    """
    stems = [path.stem for path in sorted(folder().glob("[0-9]*.ipynb"))]
    for stem in stems:
        if name in (stem, stem.split("_")[0], stem + ".ipynb"):
            return folder() / f"{stem}.ipynb"
    raise ParameterError(f"notebook {name!r}: there is none. {nearest(name, stems)}")


def declared(path: Path) -> dict[str, Parameter]:
    """The parameters a notebook declares, by name.

    Raises:
        ParameterError: it has no parameters cell, or a line in it that is no declaration.
    """
    cells = json.loads(path.read_text())["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if not tagged:
        raise ParameterError(f"{path.name}: no cell is tagged 'parameters'.")
    source = "".join(tagged[0]["source"])
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            raise ParameterError(f"{path.name}, line {node.lineno} of its parameters is not 'name: type = literal'.")
        assert isinstance(node.target, ast.Name)
        kind = ast.unparse(node.annotation).removesuffix(" | None")
        if kind not in _TYPES:
            raise ParameterError(f"{path.name}: parameter {node.target.id}: {kind} is none of {', '.join(_TYPES)}.")
        default = ast.literal_eval(node.value)
        line = lines[node.lineno - 1]
        found[node.target.id] = Parameter(
            name=node.target.id,
            type=_TYPES[kind],
            # papermill's own inspection reads no "float | None", so a knob is "float = None"
            optional=default is None,
            default=default,
            help=line.partition("#")[2].strip(),
        )
    return found


def check(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every declared parameter with its value: the given one, checked, or its default.

    Raises:
        ParameterError: an unknown name (with the nearest known one), or a value of the wrong type.
    """
    known = declared(path)
    for name in given:
        if name not in known:
            raise ParameterError(f"{path.stem} has no parameter '{name}'. {nearest(name, known)}")
    values = {name: p.check(given.get(name, p.default), where=path.stem) for name, p in known.items()}
    for name, allowed in (("budget", BUDGETS), ("executor", (None, *EXECUTORS))):
        if name in values and values[name] not in allowed:
            raise ParameterError(
                f"{path.stem}: {name}={values[name]!r}. {nearest(values[name], filter(None, allowed))}"
            )
    return values
