"""Notebooks in one canonical form, so that a diff shows what changed and nothing else."""

import base64
import copy
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools.problems import Problem

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
README_FIGURE = ROOT / "docs" / "incident.png"
CELL_METADATA = ("tags", "jp-MarkdownHeadingCollapsed")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def find(number):
    """Return the one notebook whose file name starts with `number`, such as "00".

    Raises Problem when there is none or more than one, and names what there is.
    """
    found = sorted(NOTEBOOKS.glob(f"{number}_*.ipynb"))
    if len(found) != 1:
        names = ", ".join(path.name for path in every()) or "none"
        raise Problem(f"Expected the number of one notebook, got {number!r}. There are: {names}.")
    return found[0]


def every():
    """Return the paths of all notebooks of the series, in order."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def canonical(notebook):
    """Return the notebook as the text of an .ipynb file in canonical form (nbformat 4.5).

    Sorted keys, cell ids by position, no metadata but kernel, tags and collapsed headings,
    consecutive prints joined, tracebacks cut down to their last line (the rest of them holds
    colours and the paths of the machine that made them). Neither code nor numbers are touched.
    """
    notebook = copy.deepcopy(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for position, cell in enumerate(notebook.cells, start=1):
        cell.id = f"c{position:02d}"
        cell.source = cell.source.replace("\r\n", "\n").rstrip("\n")
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs = _outputs(cell)
    return nbformat.writes(nbformat.from_dict(notebook), version=4).rstrip("\n") + "\n"


def _outputs(cell):
    outputs = []
    for output in cell.outputs:
        # How a run's prints are cut into messages depends on time.
        if outputs and output.output_type == outputs[-1].output_type == "stream":
            if output.name == outputs[-1].name:
                outputs[-1].text += output.text
                continue
        if output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]
        if "data" in output:
            output.metadata = {}
            if "image/png" in output.data:
                output.data["image/png"] = "".join(output.data["image/png"].split())
        if output.output_type == "execute_result":
            output.execution_count = cell.execution_count
        outputs.append(output)
    return outputs


def build(paths):
    """Execute each notebook in a new kernel and write it, with its outputs, in canonical form.

    Prints a line a notebook; returns 0. At the first cell that fails without the tag
    `raises-exception` it prints the error, leaves that notebook as it was, and returns 1.
    """
    # A kernel of the same name in the user's home belongs to another environment.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    paths_of_python = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths_of_python)
    os.environ.pop("PYTHONWARNINGS", None)  # a warning is an output that has to be seen
    for path in map(Path, paths):
        print(f"{path.name:<40}", end="", flush=True)
        started = time.perf_counter()
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
        try:
            _execute(notebook, path.parent)
        except CellExecutionError as error:
            print(f"  failed; it is left as it was.\n{error}", flush=True)
            return 1
        after = canonical(notebook)
        if after != before:
            path.write_text(after, encoding="utf-8", newline="\n")
        if path.name.startswith("00_"):
            README_FIGURE.write_bytes(first_figure(notebook))
        state = "unchanged" if after == before else "written"
        print(f"{time.perf_counter() - started:6.1f} s  {state}", flush=True)
    return 0


def first_figure(notebook):
    """Return the notebook's first image as PNG bytes."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", []))
    images = (o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {}))
    return base64.b64decode(next(images))


def _execute(notebook, folder):
    NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,
        timeout=600,
        # Keeps the kernel's note on unencrypted TCP off the terminal.
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    ).execute()
