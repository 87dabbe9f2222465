"""Every notebook reads, and takes its inputs, the same way."""

import ast
import re

import nbformat
import papermill
import pytest

from workup import notebooks

BOOKS = sorted(notebooks.folder().glob("[0-9][0-9]_*.ipynb"))
STANDARD = {
    "workload": (str, "digits-mlp"),
    "study": (str, None),
    "device": (str, "auto"),
    "seed": (int, 0),
    "budget": (str, "standard"),
}


@pytest.fixture(params=BOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book.cells


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def test_the_core_notebooks_are_there():
    assert {path.stem[:2] for path in BOOKS} >= {"01", "02", "04", "05", "06", "07", "11"}


def test_it_is_saved_without_outputs_and_run_by_any_python(path, cells):
    assert [cell.outputs for cell in code(cells)] == [[]] * len(code(cells))
    assert {cell.execution_count for cell in code(cells)} == {None}
    assert nbformat.read(path, as_version=4).metadata.kernelspec.name == "python3"


def test_it_opens_with_a_question_and_cites_its_rules(cells):
    assert cells[0].cell_type == "markdown"
    assert re.match(r"# .+\?\n", cells[0].source)
    assert "playbook: " in cells[0].source


def test_it_has_few_short_code_cells_without_logic_of_its_own(cells):
    assert len(code(cells)) <= 14
    assert max(len(cell.source.splitlines()) for cell in code(cells)) <= 18
    logic = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.Try, ast.If)
    assert not [node for cell in code(cells) for node in ast.walk(ast.parse(cell.source)) if isinstance(node, logic)]


def test_its_parameters_are_one_cell_of_typed_literals_with_a_help_each(cells):
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert tagged[0] is code(cells)[0]
    for line in tagged[0].source.splitlines():
        assert re.fullmatch(r"[a-z_]+: (str|int|float|bool) = [^#=]+  # [^=]+", line), line


def test_the_standard_parameters_come_first_and_its_own_default_to_the_study(path):
    declared = list(notebooks.declared(path).values())
    assert {p.name: (p.type, p.default) for p in declared[:5]} == STANDARD
    assert [p.name for p in declared[:5]] == list(STANDARD)
    assert [p.name for p in declared[5:] if p.default is not None] == []


def test_papermill_reads_every_parameter_with_its_help(path):
    read = papermill.inspect_notebook(path)
    declared = notebooks.declared(path)
    assert list(read) == list(declared)
    assert {name: about["help"] for name, about in read.items()} == {n: p.help for n, p in declared.items()}


def test_it_starts_under_its_own_name(path, cells):
    started = [name for cell in code(cells) for name in re.findall(r'start\("(\w+)", globals\(\)\)', cell.source)]
    assert started == [path.stem]
