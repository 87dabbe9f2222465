"""Every notebook at ``smoke`` on the emulated accelerator (``tests/emulated``), its child processes included."""

import matplotlib.pyplot  # the notebooks' own import finds it in the state that this one left
import nbformat
import pytest

from workup import notebooks

BOOKS = sorted(notebooks.folder().glob("[0-9][0-9]_*.ipynb"))
#: Bytes of the accelerator: a few batches of the data set, so that the probe of sizes runs out of them.
TOTAL = 2**22


def run(path, **given):
    """Execute a notebook's code cells, with its parameters replaced."""
    names = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{path.stem} {cell.id}", "exec"), names)
            if "parameters" in cell.metadata.get("tags", []):
                names |= given
    return names


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return str(tmp_path_factory.mktemp("emulated") / "study")


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_the_accelerator(path, study, emulated):
    matplotlib.use("agg")
    with emulated(total=TOTAL):
        given = {"budget": "smoke", "study": study, "workload": "digits-mlp"}
        names = run(path, **given)
        if "session" in names:
            assert names["session"].device == "cuda:0"
        if path.stem == "02_batch_size":
            assert "out_of_memory" in set(names["attempts"].status)
    matplotlib.pyplot.close("all")
