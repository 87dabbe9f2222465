"""The real data behind the built-in workloads: small files in ``data/``, and Python's own sources.

Each function returns ``(train, eval)``, two TensorDatasets that share no example. The split takes
every k-th row, so it depends on no random state; features are scaled by the training rows alone.
"""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from workup.errors import WorkupError

CHECKSUMS = {
    "digits.csv.gz": "0f622aac121cc3fc5d83397199887f8019d6db33381d033e73e300a2ce17c1ed",
    "diabetes.csv.gz": "d4e1d3f131c04cad668b6fb44523907c2f991bea0673c7de0970a60d7e69f59d",
    "breast_cancer.csv.gz": "83cdd15f577b3be6d798b5ea684e3fa081d6a2ef967cebaa7d760145c8ffb3b3",
}

#: Modules that are single files in every CPython from 3.11 on.
TRAIN_MODULES = ["argparse", "ast", "configparser", "dataclasses", "difflib", "enum", "functools", "inspect"]
TRAIN_MODULES += ["optparse", "pickle", "random", "shutil", "statistics", "subprocess", "tempfile", "typing"]
EVAL_MODULES = ["contextlib", "csv", "fractions", "heapq", "textwrap"]

Split = tuple[TensorDataset, TensorDataset]


def data_folder() -> Path:
    """The ``data`` folder: in a checkout at its root, in an installed wheel inside the package."""
    package = Path(__file__).parents[1]
    checkout = package.parents[1] / "data"
    return checkout if (checkout / "digits.csv.gz").is_file() else package / "_data"


def read_table(name: str, *, folder: Path | None = None) -> np.ndarray:
    """The numbers of a bundled file, shape [rows, columns], the target last.

    Raises:
        WorkupError: the file is missing, or its SHA-256 is not the recorded one.

    Example:
        >>> read_table("digits.csv.gz").shape
        (1797, 65)
    """
    path = (folder or data_folder()) / name
    if not path.is_file():
        raise WorkupError(f"data file {path} is missing. Restore it from the repository, or reinstall workup.")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != CHECKSUMS[name]:
        raise WorkupError(
            f"data file {path} is not the one it was: its SHA-256 is {found}, expected {CHECKSUMS[name]}. "
            "Restore it from the repository, or reinstall workup."
        )
    return np.loadtxt(path, delimiter=",", skiprows=1)


def digits(*, flat: bool = True) -> Split:
    """Handwritten digits: images in [0, 1], [64] or (``flat=False``) [1, 8, 8], and labels 0 to 9; 1437 and 360."""
    table = read_table("digits.csv.gz")
    images = torch.tensor(table[:, :-1] / 16, dtype=torch.float32)
    labels = torch.tensor(table[:, -1], dtype=torch.long)
    return _split(images if flat else images.view(-1, 1, 8, 8), labels, every=5)


def diabetes() -> Split:
    """Ten measurements of a patient and a year's progression of the disease, all standardised; 353 and 89."""
    table = read_table("diabetes.csv.gz")
    values = torch.tensor(_standardised(table, every=5), dtype=torch.float32)
    return _split(values[:, :-1], values[:, -1], every=5)


def breast_cancer(*, keep_one_in: int = 6) -> Split:
    """Thirty standardised measurements and 1.0 where malignant; 262 and 131.

    Only one in ``keep_one_in`` of the malignant rows is kept, so that they are the minority:
    24 in training, 12 in evaluation.
    """
    table = read_table("breast_cancer.csv.gz")
    malignant = table[table[:, -1] == 1][::keep_one_in]
    table = np.concatenate([malignant, table[table[:, -1] == 0]])
    features = torch.tensor(_standardised(table[:, :-1], every=3), dtype=torch.float32)
    return _split(features, torch.tensor(table[:, -1], dtype=torch.float32), every=3)


def python_sources(*, context: int = 64) -> Split:
    """Bytes of the Python standard library in windows that do not overlap, shape [context + 1], int64.

    Training and evaluation take different modules, and a window that stands in both is left out
    of training.

    Raises:
        WorkupError: this Python has no source files (an embedded or stripped one).
    """
    train, evaluate = (_windows(names, context + 1) for names in (TRAIN_MODULES, EVAL_MODULES))
    seen = {window.tobytes() for window in evaluate.numpy()}
    kept = [window.tobytes() not in seen for window in train.numpy()]
    return TensorDataset(train[torch.tensor(kept)]), TensorDataset(evaluate)


def _windows(modules: list[str], length: int) -> Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        text = b"".join((folder / f"{name}.py").read_bytes() for name in modules)
    except OSError as error:
        raise WorkupError(
            f"the text workloads read Python's own sources, and {error.filename} is not there. "
            "Use a Python that has its standard library as files."
        ) from error
    count = len(text) // length
    return torch.tensor(np.frombuffer(text, dtype=np.uint8)[: count * length].astype(np.int64)).view(count, length)


def _standardised(table: np.ndarray, *, every: int) -> np.ndarray:
    train = table[np.arange(len(table)) % every != 0]
    return (table - train.mean(axis=0)) / train.std(axis=0)


def _split(*tensors: Tensor, every: int) -> Split:
    held_out = torch.arange(len(tensors[0])) % every == 0
    return TensorDataset(*[t[~held_out] for t in tensors]), TensorDataset(*[t[held_out] for t in tensors])
