import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd

from workup.finding import Finding
from workup.show.timing import durations


def test_each_name_has_a_row_in_the_tables_order_with_its_median():
    rows = [("step", 0.010), ("loader", 0.001), ("step", 0.030), ("loader", float("nan")), ("step", 0.020)]
    finding = Finding(name="input_bound", value=False, rule="playbook: F1", summary="Not input-bound.")
    ax = durations(pd.DataFrame(rows, columns=["what", "seconds"]), "what", "seconds", title=finding)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step", "loader"]
    assert [text.get_text() for text in ax.texts] == ["20 ms", "1 ms"]
    assert [line.get_xdata().tolist() for line in ax.lines] == [[10, 30, 20], [20], [1]]
    assert ax.get_title(loc="left") == "Not input-bound."
    assert ax.get_xlabel() == "time (ms)"
    assert ax.get_xscale() == "log"
    plt.close(ax.figure)
