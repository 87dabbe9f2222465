"""The workbook end to end by stage, as `make workup` runs it.

    python -m tests.benchmarks.workbook [budget] [workload] [notebooks]

Printed, a row a notebook, from the times that papermill left in its executed copy: the kernel's start (from the last
notebook's end to this one's first cell), its imports and set-up (to the end of the cell with ``start(``), and the rest;
then the whole, what came before the first notebook and after the last included.
"""

import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import nbformat


def at(text):
    return datetime.fromisoformat(text).timestamp()


def stages(path, before):
    """(seconds to the first cell, to the end of the set-up, of the rest; when it ended)."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.metadata.papermill.start_time]
    began, ready = at(cells[0].metadata.papermill.start_time), [c for c in cells if re.search(r"\bstart\(", c.source)]
    ended = at(notebook.metadata.papermill.end_time)
    set_up = at(ready[0].metadata.papermill.end_time)
    return began - before, set_up - began, ended - set_up, ended


def rows(budget="standard", workload="digits-mlp", chosen=None):
    """A line of the table a notebook, then the whole: name, figure, mark."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from workup.cli import main; main()", "run", workload, "--budget", budget]
        command += ["--study", f"{folder}/study", *(["--notebooks", chosen] if chosen else [])]
        began = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        whole, before, fixed = time.time() - began, None, 0.0
        for path in sorted(Path(folder, "study", "notebooks").glob("*.ipynb")):
            metadata = nbformat.read(path, as_version=4).metadata.papermill
            kernel, set_up, rest, ended = stages(path, before or at(metadata.start_time))
            before, fixed = ended, fixed + kernel + set_up
            yield path.stem, f"kernel {kernel:.1f} s, set-up {set_up:.1f} s, the rest {rest:.1f} s", ""
    yield f"{workload}, {budget}", f"{whole:.1f} s, of it kernels and set-up {fixed:.1f} s", ""


if __name__ == "__main__":
    for row in rows(*sys.argv[1:]):
        print(*row, sep="  |  ", flush=True)
