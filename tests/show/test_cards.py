"""Cards and tables: the words a reader gets."""

import pandas as pd
import pytest

from workup.finding import Finding
from workup.show.cards import COLOURS, INCONCLUSIVE, answer, cards, table

BEST = Finding(
    name="best_lr",
    value=0.0316,
    rule="playbook: C1",
    summary="0.0316 trains best.",
    interval=(0.01, 0.1),
    confidence="high",
    evidence={"unstable_lr": 0.3, "norms": list(range(500))},
    caveats=("Holds at 300 steps.",),
)
NONE = Finding(
    name="unstable_lr", value=None, rule="r", summary="None up to 1.", confidence="high", settle="Sweep higher."
)
UNKNOWN = Finding(name="warmup_steps", value=None, rule="playbook: D4", summary="No ramp helps.", settle="Try 100 x.")


def test_a_card_has_name_answer_sureness_summary_rule_caveats_and_folded_evidence():
    page = cards(BEST)._repr_html_()
    words = ["Best learning rate", "0.0316 (0.01 to 0.1)", "high confidence", "0.0316 trains best.", "(playbook: C1)"]
    assert [text for text in [*words, "But: Holds at 300 steps."] if text not in page] == []
    folded = page[page.index("<details") : page.index("</details>")]
    assert "unstable lr" in folded
    assert "0.3" in folded
    assert COLOURS["high"][0] in page


def test_long_evidence_is_cut_and_its_length_told():
    page = cards(BEST)._repr_html_()
    assert "(500 in all)" in page
    assert "499" not in page


def test_evidence_is_named_in_plain_words_in_a_unit_one_reads_and_what_is_empty_is_left_out():
    evidence = {"margin": 0.25, "peak_bytes": 3 * 2**30, "stalled": [], "grid_end": None, "gain": 1.5}
    page = cards(Finding(name="x", value=1, rule="r", summary="s", evidence=evidence))._repr_html_()
    folded = page[page.index("<details") : page.index("</details>")]
    assert [
        text for text in ("share of the memory limit left free", "3 GiB", "gain", "1.5") if text not in folded
    ] == []
    assert [text for text in ("margin<", "stuck", "grid", "none") if text in folded] == []


def test_a_table_has_words_at_the_left_numbers_at_the_right_and_no_index_unless_it_is_named():
    frame = pd.DataFrame({"lr": [0.0316228, 1e-6], "status": ["finished", "out_of_memory"], "final": [2.31923, None]})
    page = table(frame)._repr_html_()
    sides = {text: page.split(f">{text}<")[0].rsplit("text-align:", 1)[1][:4] for text in ("lr", "status", "0.03162")}
    assert sides == {"lr": "righ", "status": "left", "0.03162": "righ"}
    assert repr(table(frame)).split() == [
        *("lr", "status", "final", "-------", "-------------", "-----"),
        *("0.03162", "finished", "2.319", "1e-06", "out_of_memory"),
    ]
    assert repr(table(frame.set_index(frame["status"].rename("how")))).startswith("how ")


def test_every_text_of_a_table_is_escaped_and_kept_as_it_is():
    page = table(pd.DataFrame({"<b>": ["a_file.py <script>"]}))._repr_html_()
    assert "a_file.py &lt;script&gt;" in page
    assert "&lt;b&gt;" in page


def test_what_cannot_be_told_says_what_would_settle_it_and_claims_no_confidence():
    page = cards(UNKNOWN)._repr_html_()
    assert "To settle it: Try 100 x." in page
    assert "confidence" not in page
    assert INCONCLUSIVE[0] in page
    assert answer(UNKNOWN) == "cannot tell"
    assert answer(NONE) == "none found"


def test_every_text_of_a_card_is_escaped():
    evil = "<script>alert('x')</script>"
    finding = Finding(
        name=evil, value=evil, unit=evil, rule=evil, summary=evil, settle=evil, caveats=(evil,), evidence={evil: evil}
    )
    page = cards([finding])._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 8  # all but settle, which is for what cannot be told


def test_cards_need_neither_style_sheet_nor_fixed_ink_so_they_read_on_light_and_dark():
    page = cards([BEST, UNKNOWN])._repr_html_()
    assert "<style" not in page
    assert "<script" not in page
    inks = {part.split(";")[0].split('"')[0] for part in page.replace("-color:", "=").split("color:")[1:]}
    assert inks == {COLOURS["high"][1], "inherit"} | {INCONCLUSIVE[1]}


def test_text_reads_the_same_in_a_terminal():
    assert repr(cards({"best_lr": BEST, "warmup_steps": UNKNOWN})).splitlines() == [
        "Best learning rate of the short sweep: 0.0316 (0.01 to 0.1) [high confidence]",
        "  0.0316 trains best. (playbook: C1)",
        "  But: Holds at 300 steps.",
        "Warmup steps: cannot tell [cannot tell]",
        "  No ramp helps. (playbook: D4)",
        "  To settle it: Try 100 x.",
    ]


def test_no_finding_is_said():
    assert repr(cards([])) == "No finding yet."
    assert "No finding yet" in cards([])._repr_html_()


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (4096, "examples", "4,096 examples"),
        (1.5e7, "bytes", "15,000,000 bytes"),
        (0.000123456, "", "0.000123"),
        ("mid_recovered", "", "mid recovered"),
        ("see my_file.py", "", "see my_file.py"),
        ({"warmup": {"final": 0.25, "best": None}, "adam": {"final": 2}}, "", "warmup: final: 0.25; adam: final: 2"),
        (True, "", "yes"),
        (float("inf"), "", "inf"),
    ],
)
def test_answers_are_spelled(value, unit, words):
    assert answer(Finding(name="x", value=value, unit=unit, rule="r", summary="s")) == words
