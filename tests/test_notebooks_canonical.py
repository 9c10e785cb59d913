"""The canonical form keeps all that is content, drops the rest, and is what `build` writes."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import notebooks
from tools.problems import Problem


def messy():
    """A notebook as JupyterLab and a kernel leave it."""
    error = new_output(
        "error",
        ename="ValueError",
        evalue="no",
        traceback=["\x1b[0;31mValueError\x1b[0m in /home/me/run.py", "ValueError: no"],
    )
    outputs = [
        new_output("stream", name="stdout", text="a\n"),
        new_output("stream", name="stdout", text="b\n"),
        new_output("stream", name="stderr", text="c\n"),
        new_output(
            "display_data",
            data={"image/png": "aGVs\nbG8=\n", "text/plain": "It rises."},
            metadata={"needs_background": "light"},
        ),
        new_output("execute_result", data={"text/plain": "1"}, execution_count=7),
        error,
    ]
    return new_notebook(
        metadata={
            "kernelspec": {"display_name": "mine", "language": "python", "name": "mine"},
            "language_info": {"name": "python", "version": "3.11.7"},
            "widgets": {},
        },
        cells=[
            new_markdown_cell("# Ä\r\n\n", metadata={"jp-MarkdownHeadingCollapsed": True}),
            new_code_cell(
                "x\n",
                execution_count=3,
                outputs=outputs,
                metadata={"tags": ["raises-exception"], "trusted": True, "scrolled": False},
            ),
        ],
    )


def test_canonical_keeps_content_and_drops_the_rest():
    text = notebooks.canonical(messy())
    assert json.loads(text) == {
        "cells": [
            {
                "cell_type": "markdown",
                "id": "c01",
                "metadata": {"jp-MarkdownHeadingCollapsed": True},
                "source": ["# Ä"],
            },
            {
                "cell_type": "code",
                "execution_count": 3,
                "id": "c02",
                "metadata": {"tags": ["raises-exception"]},
                "outputs": [
                    {"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]},
                    {"name": "stderr", "output_type": "stream", "text": ["c\n"]},
                    {
                        "data": {"image/png": "aGVsbG8=", "text/plain": ["It rises."]},
                        "metadata": {},
                        "output_type": "display_data",
                    },
                    {
                        "data": {"text/plain": ["1"]},
                        "execution_count": 3,
                        "metadata": {},
                        "output_type": "execute_result",
                    },
                    {
                        "ename": "ValueError",
                        "evalue": "no",
                        "output_type": "error",
                        "traceback": ["ValueError: no"],
                    },
                ],
                "source": ["x"],
            },
        ],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_canonical_text_is_sorted_indented_by_one_and_ends_with_one_newline():
    text = notebooks.canonical(messy())
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def test_canonical_of_canonical_is_the_same():
    text = notebooks.canonical(messy())
    assert notebooks.canonical(nbformat.reads(text, as_version=4)) == text


def test_canonical_leaves_its_argument_alone():
    notebook = messy()
    notebooks.canonical(notebook)
    assert notebook.cells[1].outputs[0].text == "a\n"
    assert notebook.metadata.kernelspec.name == "mine"


def write(folder, *sources, tags=()):
    cells = [new_code_cell(source, metadata={"tags": list(tags)}) for source in sources]
    path = folder / "07_try.ipynb"
    path.write_text(nbformat.writes(new_notebook(cells=cells)), encoding="utf-8")
    return path


def test_build_stores_outputs_in_canonical_form_and_once(tmp_path, capsys):
    path = write(tmp_path, "import nan_lab, os\nprint(os.getcwd() == 'x')", "6 * 7")
    assert notebooks.build([path]) == 0
    text = path.read_text("utf-8")
    first, second = nbformat.reads(text, as_version=4).cells
    assert first.outputs[0].text == "False\n" and first.execution_count == 1
    assert second.outputs[0].data["text/plain"] == "42" and second.execution_count == 2
    assert text == notebooks.canonical(nbformat.reads(text, as_version=4))
    assert notebooks.build([path]) == 0
    assert path.read_text("utf-8") == text
    written, unchanged = capsys.readouterr().out.splitlines()
    assert written.endswith("s  written") and unchanged.endswith("s  unchanged")


def test_build_leaves_a_notebook_that_fails(tmp_path, capsys):
    path = write(tmp_path, "1 / 0")
    before = path.read_text("utf-8")
    assert notebooks.build([path]) == 1
    assert path.read_text("utf-8") == before
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_build_stores_an_error_that_is_meant(tmp_path):
    path = write(tmp_path, "1 / 0", tags=["raises-exception"])
    assert notebooks.build([path]) == 0
    stored = nbformat.read(path, as_version=4).cells[0].outputs[0]
    assert stored.traceback == ["ZeroDivisionError: division by zero"]


def test_find_takes_the_number(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    path = write(tmp_path, "1")
    assert notebooks.find("07") == path
    with pytest.raises(Problem, match="got '01'. There are: 07_try.ipynb"):
        notebooks.find("01")
