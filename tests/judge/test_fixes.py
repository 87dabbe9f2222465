import pandas as pd
import pytest

from workup.judge import fixes
from workup.judge.difference import compare


def tried(**rows):
    """fix -> (stability, final), the initial loss being 2.3."""
    table = [{"fix": fix.replace("_", " "), "stability": s, "final": f, "initial": 2.3} for fix, (s, f) in rows.items()]
    return pd.DataFrame(table)


def test_the_first_remedy_in_the_playbooks_order_that_pays_is_recommended():
    found = fixes.judge(
        tried(nothing=("diverged", 9.0), clipping=("stable", 0.3), warmup=("stable", 0.4), lower_lr=("stable", 0.5))
    )
    assert found.value == "warmup"
    assert "lowest final loss came with clipping (0.3)" in found.summary


def test_a_remedy_that_ends_no_lower_than_the_present_rate_is_not_worth_having():
    found = fixes.judge(tried(nothing=("mid", 2.0), clipping=("stable", 0.07), lower_lr=("stable", 0.0002)))
    assert found.value == "none"
    assert "ends higher than the best calm rate, by 3% of the descent" in found.summary


def test_nothing_is_recommended_where_nothing_is_wrong():
    assert fixes.judge(tried(nothing=("stable", 0.5))).value == "none"


def test_where_no_remedy_restores_stability_the_model_is_looked_at():
    table = tried(nothing=("early", 2.3), warmup=("early", 2.3), clipping=("mid", 2.0), lower_lr=("early", 2.2))
    assert fixes.judge(table).value == "architecture"


def test_without_the_unfixed_trial_it_cannot_be_told():
    assert not fixes.judge(tried(warmup=("stable", 0.5))).is_conclusive


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_whether_a_remedy_is_worth_having_does_not_depend_on_the_losses_scale(scale):
    def fix_of(final):
        table = tried(nothing=("mid", 2.0), warmup=("stable", final), lower_lr=("stable", 0.2))
        return fixes.judge(table.assign(final=table.final * scale, initial=2.3 * scale)).value

    assert (fix_of(0.1), fix_of(0.199)) == ("warmup", "none")


def test_a_remedy_that_over_seeds_ends_no_lower_is_not_recommended():
    table = tried(nothing=("mid", 2.0), warmup=("stable", 0.1), lower_lr=("stable", 0.2))
    assert fixes.judge(table, beside=compare([0.1, 0.11, 0.12], [0.2, 0.21, 0.2], 2.3)).value == "warmup"
    found = fixes.judge(table, beside=compare([0.1, 0.3, 0.2], [0.2, 0.2, 0.2], 2.3))
    assert found.value == "none"
    assert "3 seeds" in found.summary


def test_the_lowest_unstable_rate_decides_and_the_highest_is_told():
    low = tried(nothing=("mid", 2.0), warmup=("stable", 0.1), clipping=("stable", 0.2)).assign(times=2.0)
    high = tried(nothing=("diverged", 9.0), warmup=("diverged", 9.0), clipping=("stable", 0.5)).assign(times=10.0)
    lower = tried(lower_lr=("stable", 0.5)).assign(times=1.0)
    found = fixes.judge(pd.concat([low, high, lower]))
    assert found.value == "warmup"
    assert "at 10 times the rate it does not" in found.summary
    assert found.evidence["restored_at_highest"] == ["clipping", "lower lr"]
    assert found.evidence["at 10 times the rate"]["warmup"] == {"stability": "diverged", "final": 9.0}


def test_where_nothing_helps_what_the_audit_found_is_told():
    table = tried(nothing=("early", 2.3), warmup=("early", 2.3))
    assert "the model has no normalisation" in fixes.judge(table, advice="no normalisation").summary
    table = pd.concat([table, tried(lower_lr=("stable", 0.5))])
    found = fixes.judge(table, advice="no normalisation")
    assert found.value == "none"
    assert "The model has no normalisation" in found.summary
