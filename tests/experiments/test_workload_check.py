from workup.experiments import workload_check as experiment
from workup.measure.check import Check, check


def made(*results):
    return [
        Check(name=f"check {i}", result=result, detail=f"seen {i}", rule="playbook: A3")
        for i, result in enumerate(results)
    ]


def test_the_verdict_is_the_worst_result_and_names_where_to_look():
    assert experiment.verdict(made("pass", "pass")).value == "pass"
    warned = experiment.verdict(made("pass", "warn", "pass"))
    assert (warned.value, warned.caveats) == ("warn", ("check 1: seen 1",))
    failed = experiment.verdict(made("warn", "fail"))
    assert (failed.value, failed.summary) == ("fail", "Not ready to train: check 1.")
    assert failed.caveats == ("check 1: seen 1", "check 0: seen 0")
    assert failed.evidence == {"check 0": "warn: seen 0", "check 1": "fail: seen 1"}


def test_the_table_has_one_row_per_check(workload):
    checks = check(workload)
    table = experiment.table(checks)
    assert list(table.columns) == ["check", "result", "detail", "rule"]
    assert table.check.tolist() == [c.name for c in checks]
    assert experiment.verdict(checks).value == "pass"
