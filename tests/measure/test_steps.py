import json

from workup.measure.steps import PARTS, profile_steps


def test_the_trace_is_chromes_json_with_the_parts_of_each_step(workload):
    text, _ = profile_steps(workload, batch_size=16, steps=3, warmup=1)
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    spans = {part: [e for e in events if e["name"] == part and e["cat"] == "user_annotation"] for part in PARTS}
    assert {part: len(found) for part, found in spans.items()} == dict.fromkeys(PARTS, 3)
    begins = [spans[part][0]["ts"] for part in PARTS]
    assert begins == sorted(begins)


def test_the_summary_is_per_step_with_the_parts_first(workload):
    _, table = profile_steps(workload, batch_size=16, steps=4, warmup=1)
    assert set(table.name[: len(PARTS)]) == set(PARTS)
    assert table.part.tolist() == [True] * len(PARTS) + [False] * (len(table) - len(PARTS))
    calls = table.set_index("name").calls
    assert calls["aten::linear"] == 2
    assert (calls[list(PARTS)] == 1).all()
    assert (table.total_ms >= table.self_ms - 1e-9).all()
