"""README's picture: three figures of one study's executed notebooks, side by side.

    python -m tests.benchmarks.picture STUDY docs/workup.png

The sweep, training around the prescribed rate, and the comparison with today's settings, as ``make workup`` drew them.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from PIL import Image

#: Notebook and which of its figures.
SHOWN = (("04_learning_rate", 0), ("05_instability", 1), ("11_final_run", -1))
HEIGHT, BETWEEN = 380, 16


def figures(study, notebook):
    """The figures of an executed notebook, in its order."""
    cells = nbformat.read(Path(study, "notebooks", f"{notebook}.ipynb"), as_version=4).cells
    found = [output.data["image/png"] for cell in cells for output in cell.get("outputs", []) if "data" in output
             and "image/png" in output.data]  # fmt: skip
    return [Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB") for text in found]


def main(study, target):
    parts = [figures(study, notebook)[which] for notebook, which in SHOWN]
    parts = [
        part.resize((round(part.width * HEIGHT / part.height), HEIGHT), Image.Resampling.LANCZOS) for part in parts
    ]
    joined = Image.new("RGB", (sum(part.width + BETWEEN for part in parts) - BETWEEN, HEIGHT), "white")
    left = 0
    for part in parts:
        joined.paste(part, (left, 0))
        left += part.width + BETWEEN
    joined.save(target, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
