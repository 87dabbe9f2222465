"""Progress: few readable lines in logs, a bar that leaves text behind in JupyterLab."""

import pytest

from workup.progress import progress


class Clock:
    """A clock that moves when told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def outside_jupyterlab(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)


def run(seconds_each, total, **how):
    clock = Clock()
    with progress(total, "learning rate sweep", clock=clock, **how) as stage:
        for _ in range(total):
            clock.now += seconds_each
            stage.advance()


def test_a_short_stage_says_one_line_at_its_end(capsys):
    run(0.9, 11)
    assert capsys.readouterr().out == "learning rate sweep: 11 trials in 9.9 s\n"


def test_a_long_stage_says_how_long_it_will_take_and_not_more_often_than_every_15_seconds(capsys):
    run(4.0, 13)
    assert capsys.readouterr().out.splitlines() == [
        "learning rate sweep: 3 of 13 trials, about 40.0 s left",
        "learning rate sweep: 7 of 13 trials, about 24.0 s left",
        "learning rate sweep: 11 of 13 trials, about 8.0 s left",
        "learning rate sweep: 13 trials in 52.0 s",
    ]


def test_a_note_and_another_unit_are_shown(capsys):
    clock = Clock()
    with progress(2, "batch size", unit="sizes", clock=clock) as stage:
        clock.now = 11.0
        stage.advance(note="64 fits")
        stage.advance()
    assert capsys.readouterr().out.splitlines()[0] == "batch size: 1 of 2 sizes, about 11.0 s left (64 fits)"


def test_an_interrupted_stage_says_how_far_it_came_and_lets_the_interrupt_through(capsys):
    def interrupted():
        clock = Clock()
        with progress(5, "sweep", clock=clock) as stage:
            stage.advance(2)
            clock.now = 3.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().out == "sweep: stopped after 2 of 5 trials in 3.0 s\n"


def test_one_trial_is_one_trial(capsys):
    run(1.0, 1)
    assert capsys.readouterr().out == "learning rate sweep: 1 trial in 1.0 s\n"


def test_nothing_to_do_is_no_fault(capsys):
    run(1.0, 0)
    assert capsys.readouterr().out == "learning rate sweep: 0 trials in 0.0 s\n"


def test_in_jupyterlab_a_bar_moves_and_text_takes_its_place(monkeypatch, capsys):
    import ipywidgets
    from IPython import display

    shown, replaced = [], []

    class Handle:
        def update(self, data, raw):
            assert raw
            replaced.append(data)

    def show(widget, display_id):
        assert display_id
        shown.append(widget)
        return Handle()

    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    monkeypatch.setattr(display, "display", show)
    clock = Clock()
    with progress(4, "sweep", clock=clock) as stage:
        bar, text = shown[0].children
        assert isinstance(bar, ipywidgets.IntProgress)
        clock.now = 5.0
        stage.advance()
        assert (bar.value, bar.max, text.value) == (1, 4, "sweep: 1 of 4 trials, about 15.0 s left")
        stage.advance(3)
    assert replaced == [{"text/plain": "sweep: 4 trials in 5.0 s"}]
    assert bar.comm is None  # closed: no widget state is left for the notebook to save
    assert capsys.readouterr().out == ""


def test_a_kernel_of_jupyterlab_leaves_only_text_in_the_saved_notebook(monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    source = "from workup.progress import progress\nwith progress(3, 'sweep') as stage:\n    stage.advance(3)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=120, store_widget_state=False).execute()
    (output,) = notebook.cells[0].outputs
    assert list(output.data) == ["text/plain"]
    assert output.data["text/plain"].startswith("sweep: 3 trials in ")
