"""The notebooks pass the lint, and each rule of the lint finds the mistake it is for."""

import base64
import io

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from tools import lint, notebooks


@pytest.mark.parametrize("path", notebooks.every(), ids=lambda path: path.name)
def test_notebooks_of_the_series(path):
    assert lint.lint(path) == []


def test_there_are_notebooks_to_lint():
    assert notebooks.every()


def png(width=8, noise=False):
    """A PNG in base64; noise does not compress, so that `width` decides its size."""
    image = Image.effect_noise((width, width), 80) if noise else Image.new("L", (width, width))
    file = io.BytesIO()
    image.save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def printed(text):
    return new_output("stream", name="stdout", text=text)


def shown(**data):
    return new_output("display_data", data={key.replace("_", "/"): data[key] for key in data})


def raised():
    return new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])


def good():
    """A notebook with something of everything and nothing wrong: intro, 3 code cells, end."""
    picture = shown(image_png=png(), text_plain="The loss falls to zero.")
    return new_notebook(
        cells=[
            new_markdown_cell(
                "# Title\n\nYou will be able to read it, in 5 minutes. [On](#Key-points)"
            ),
            new_code_cell("print(1)", execution_count=1, outputs=[printed("1\n")]),
            new_code_cell("_ = draw()", execution_count=2, outputs=[picture]),
            new_code_cell(
                "raise ValueError('no')",
                execution_count=3,
                outputs=[raised()],
                metadata={"tags": ["raises-exception"]},
            ),
            new_markdown_cell("## Key points\n\n`[x](y)`\n\n## References\n\n[a](https://b.org)"),
        ]
    )


def findings(folder, notebook):
    path = folder / "00_try.ipynb"
    path.write_text(notebooks.canonical(notebook), encoding="utf-8")
    return lint.lint(path)


def test_a_good_notebook_has_no_findings(tmp_path):
    assert findings(tmp_path, good()) == []


def set_source(position, source):
    def change(notebook):
        notebook.cells[position].source = source

    return change


def add_text(text):
    def change(notebook):
        notebook.cells[-1].source += "\n\n" + text

    return change


def remove_text(position, text):
    def change(notebook):
        assert text in notebook.cells[position].source
        notebook.cells[position].source = notebook.cells[position].source.replace(text, "")

    return change


def set_output(position, *outputs):
    def change(notebook):
        notebook.cells[position].outputs = list(outputs)

    return change


def set_count(position, count):
    def change(notebook):
        notebook.cells[position].execution_count = count

    return change


def set_tags(position, *tags):
    def change(notebook):
        notebook.cells[position].metadata = {"tags": list(tags)}

    return change


LONG = "\n".join(["x = 1"] * 26)
MISTAKES = {
    "not executed": (set_count(2, None), "Cell 3: its execution count is None instead of 2."),
    "executed twice": (set_count(2, 7), "Cell 3: its execution count is 7 instead of 2."),
    "stderr": (
        set_output(1, new_output("stream", name="stderr", text="oh")),
        "Cell 2: it stores stderr",
    ),
    "error untagged": (set_tags(3), "Cell 4: it stores the error ValueError but is not tagged"),
    "tag, no error": (set_output(3), "Cell 4: it is tagged raises-exception but stores no error."),
    "unknown tag": (set_tags(1, "raises-exeption"), "Cell 2: the tag 'raises-exeption' is unknown"),
    "skip tag": (set_tags(1, "nbval-skip"), "Cell 2: the tag 'nbval-skip' is unknown"),
    "tag on text": (set_tags(0, "solution"), "Cell 1: the tag 'solution' is unknown"),
    "svg": (set_output(1, shown(**{"image_svg+xml": "<svg/>"})), "Cell 2: it stores an SVG"),
    "svg in html": (set_output(1, shown(text_html="<b><svg></b>")), "Cell 2: it stores an SVG"),
    "semicolon": (set_source(1, "draw();"), "Cell 2: a line ends with ;"),
    "semicolon, comment": (set_source(1, "draw();  # now"), "Cell 2: a line ends with ;"),
    "semicolon inside": (set_source(1, "draw(); \nx = 1"), "Cell 2: a line ends with ;"),
    "Out": (set_source(1, "print(Out[1])"), "Cell 2: it uses IPython's Out,"),
    "In": (set_source(1, "len(In)"), "Cell 2: it uses IPython's In,"),
    "_1": (set_source(1, "print(_1)"), "Cell 2: it uses IPython's _1,"),
    "no Python": (set_source(1, "if so:"), "Cell 2: it is not Python: "),
    "marker": (set_source(1, "# NBVAL_IGNORE_OUTPUT\nx"), "Cell 2: the marker NBVAL_IGNORE_OUTPUT"),
    "marker, small": (set_source(1, "x  #nbval_skip"), "Cell 2: the marker nbval_skip"),
    "old marker": (
        set_source(1, "# PYTEST_VALIDATE_IGNORE_OUTPUT"),
        "Cell 2: the marker PYTEST_VALIDATE_IGNORE_OUTPUT",
    ),
    "large output": (set_output(1, printed("x" * 60_000)), "Cell 2: an output has 60"),
    "large table": (set_output(1, shown(text_html="x" * 61_000)), "Cell 2: an output has 61"),
    "large image": (
        set_output(2, shown(image_png=png(250, noise=True), text_plain="It is noise only.")),
        "Cell 3: an image has ",
    ),
    "no description": (set_output(2, shown(image_png=png())), "Cell 3: an image's text/plain is"),
    "matplotlib's own": (
        set_output(2, shown(image_png=png(), text_plain="<Figure size 640x480 with 1 Axes>")),
        "Cell 3: an image's text/plain is not a sentence",
    ),
    "no sentence": (
        set_output(2, shown(image_png=png(), text_plain="loss")),
        "Cell 3: an image's text/plain is not a sentence",
    ),
    "long cell": (set_source(1, LONG), "Cell 2: it has 26 lines; 25 is the most."),
    "no title": (remove_text(0, "# Title"), "The first cell does not start with a title"),
    "no objectives": (remove_text(0, "will be able to"), "The objectives are missing"),
    "no minutes": (remove_text(0, "5 minutes"), "No text says how many minutes"),
    "no references": (remove_text(4, "## References"), 'There is no heading "References".'),
    "dead link": (add_text("[b](09_gone.ipynb)"), "Cell 5: the link 09_gone.ipynb leads nowhere."),
    "dead link in html": (add_text('<a href="../gone">b</a>'), "Cell 5: the link ../gone leads"),
    "absolute link": (add_text("[b](/etc)"), "Cell 5: the link /etc leads nowhere."),
    "dead anchor": (add_text("[b](#Gone)"), "Cell 5: the link #Gone leads to no heading"),
    "dead anchor there": (
        add_text("[b](00_try.ipynb#Gone)"),
        "Cell 5: the link 00_try.ipynb#Gone leads to no heading",
    ),
    "image without text": (add_text("![](https://b.org/a.png)"), "Cell 5: an image has no alt"),
    "img without alt": (add_text('<img src="https://b.org/a">'), "Cell 5: an image has no alt"),
    "home folder": (
        set_output(1, printed("in /home/me/run.py")),
        "Cell 2: an output names a place on one machine: /home/me/run.py.",
    ),
    "kernel's folder": (
        set_output(1, printed("/tmp/ipykernel_7/1.py:3: UserWarning")),
        "Cell 2: an output names a place on one machine: /tmp/ipykernel_7/1.py:3:.",
    ),
    "Windows folder": (
        set_output(1, shown(text_plain=r"C:\Users\me")),
        "Cell 2: an output names a place on one machine",
    ),
    "packages' folder": (
        set_output(1, shown(text_html="lib/site-packages/torch")),
        "Cell 2: an output names a place on one machine",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_lint_finds(tmp_path, mistake):
    change, expected = MISTAKES[mistake]
    notebook = good()
    change(notebook)
    found = findings(tmp_path, notebook)
    assert len(found) == 1 and found[0].startswith(expected), found


def test_lint_finds_missing_key_points(tmp_path):
    """Apart, since the good notebook's link to this heading is then dead too."""
    notebook = good()
    remove_text(4, "## Key points")(notebook)
    found = findings(tmp_path, notebook)
    assert found[0] == 'There is no heading "Key points".' and len(found) == 2


def test_lint_finds_a_path_in_an_error(tmp_path):
    notebook = good()
    notebook.cells[3].outputs[0].evalue = "no file /root/x"
    assert findings(tmp_path, notebook) == [
        "Cell 4: an output names a place on one machine: /root/x."
    ]


def test_lint_finds_what_is_not_canonical(tmp_path):
    path = tmp_path / "00_try.ipynb"
    path.write_text(notebooks.canonical(good()).replace('"id": "c02"', '"id": "a"'), "utf-8")
    assert lint.lint(path) == ["The file is not in canonical form: store it with course.py build."]


@pytest.mark.parametrize(
    "source",
    ["text = 'a;'", "x = 1  # so;", "a = 1; b = 2", "_ = draw()", "%matplotlib inline", "In_ = 1"],
)
def test_lint_leaves_alone(tmp_path, source):
    notebook = good()
    notebook.cells[1].source = source
    assert findings(tmp_path, notebook) == []


@pytest.mark.parametrize("text", ["log/home page", "https://b.org/home/x", "1/tmp", "a: b"])
def test_lint_takes_no_words_for_paths(tmp_path, text):
    notebook = good()
    notebook.cells[1].outputs = [printed(text)]
    assert findings(tmp_path, notebook) == []
