"""Looks for mistakes in a notebook of the series; every finding is a plain sentence."""

import ast
import base64
import io
import json
import re
import tokenize
from pathlib import Path
from urllib.parse import unquote

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

from tools.notebooks import canonical

MOST_LINES = 25
MOST_OUTPUT = 60_000  # bytes of JSON
MOST_IMAGE = 40_000  # bytes of PNG
TAGS = {"raises-exception"}
MACHINE = re.compile(
    r"(?<![\w.-])/(?:work|home|root|tmp|usr|opt|var|mnt|private|Users)\b\S*"
    r"|\b[A-Z]:\\\w\S*|site-packages\S*"
)
MARKER = re.compile(r"#\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)", re.IGNORECASE)
HISTORY = re.compile(r"In|Out|_i+|__+|_i?\d+|_ih|_oh")  # IPython's names for earlier cells
LINK = re.compile(r"\]\(\s*<?([^\s)>]+)|(?:href|src)=[\"']([^\"']+)")
UNSAID_IMAGE = re.compile(r"!\[\s*\]\(|<img(?![^>]*\balt=[\"'][^\"'])")


def lint(path):
    """Return what is wrong with the notebook at `path`, one sentence each; [] when it is well."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    return list(_findings(path, text, notebook))


def _findings(path, text, notebook):
    if text != canonical(notebook):
        yield "The file is not in canonical form: store it with course.py build."
    yield from _parts(notebook)
    executed = 0
    for position, cell in enumerate(notebook.cells, start=1):
        found = list(_any_cell(cell))
        if cell.cell_type == "code":
            executed += 1
            found += _code_cell(cell, executed)
        elif cell.cell_type == "markdown":
            found += _markdown_cell(cell, path, notebook)
        yield from (f"Cell {position}: {sentence}" for sentence in found)


def _parts(notebook):
    """What the notebook as a whole must have."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield "The first cell does not start with a title (# ...)."
    whole = "\n".join(texts)
    if "will be able to" not in whole:
        yield 'The objectives are missing: no text says what the reader "will be able to" do.'
    if not re.search(r"\b\d+ minutes\b", whole):
        yield "No text says how many minutes the notebook takes."
    for heading in ("Key points", "References"):
        if not re.search(rf"^#+ .*\b{heading}\b", whole, re.MULTILINE):
            yield f'There is no heading "{heading}".'


def _any_cell(cell):
    lines = len(cell.source.splitlines())
    if lines > MOST_LINES:
        yield f"it has {lines} lines; {MOST_LINES} is the most."
    for tag in cell.metadata.get("tags", []):
        if tag not in TAGS:
            yield f"the tag {tag!r} is unknown; known is {', '.join(sorted(TAGS))}."


def _code_cell(cell, executed):
    if cell.execution_count != executed:
        yield f"its execution count is {cell.execution_count} instead of {executed}."
    for marker in MARKER.findall(cell.source):
        yield f"the marker {marker} hides an output from nbval."
    yield from _code(TransformerManager().transform_cell(cell.source))
    errors = [output for output in cell.outputs if output.output_type == "error"]
    tagged = "raises-exception" in cell.metadata.get("tags", [])
    if errors and not tagged:
        yield f"it stores the error {errors[0].ename} but is not tagged raises-exception."
    if tagged and not errors:
        yield "it is tagged raises-exception but stores no error."
    for output in cell.outputs:
        yield from _output(output)


def _code(source):
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"it is not Python: {error.msg} in line {error.lineno}."
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if HISTORY.fullmatch(node.id):
                yield f"it uses IPython's {node.id}, which nbval does not have."
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    after = {tokenize.NEWLINE, tokenize.COMMENT}
    for token, following in zip(tokens, tokens[1:], strict=False):
        if token.type == tokenize.OP and token.string == ";" and following.type in after:
            yield "a line ends with ;, which hides nothing from nbval: write _ = ... instead."


def _output(output):
    if output.output_type == "stream" and output.name == "stderr":
        yield f"it stores stderr: {output.text.strip()[:60]!r}."
    data = output.get("data", {})
    if "image/svg+xml" in data or "<svg" in str(data.get("text/html", "")):
        yield "it stores an SVG, which nbval compares letter by letter: use PNG."
    if "image/png" in data:
        yield from _image(data)
    words = {kind: value for kind, value in data.items() if not kind.startswith("image/")}
    stored = json.dumps([words, output.get("text"), output.get("evalue")], ensure_ascii=False)
    size = len(stored.encode("utf-8"))
    if size > MOST_OUTPUT:
        yield f"an output has {size} bytes; {MOST_OUTPUT} is the most."
    for value in [*words.values(), output.get("text", ""), output.get("evalue", "")]:
        found = MACHINE.search(str(value))
        if found:
            yield f"an output names a place on one machine: {found[0][:60]}."


def _image(data):
    size = len(base64.b64decode(data["image/png"]))
    if size > MOST_IMAGE:
        yield f"an image has {size} bytes; {MOST_IMAGE} is the most."
    description = data.get("text/plain", "").strip()
    if not re.fullmatch(r"[^<\s].*\w+\s+\w+\s.*[.!?]", description, re.DOTALL):
        yield f"an image's text/plain is not a sentence that describes it: {description[:60]!r}."


def _markdown_cell(cell, path, notebook):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", cell.source, flags=re.DOTALL)
    if UNSAID_IMAGE.search(prose):
        yield "an image has no alternative text."
    for target in (first or second for first, second in LINK.findall(prose)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # https:, mailto:, attachment:
        file, _, anchor = unquote(target).partition("#")
        if file.startswith("/") or not (path.parent / file).exists():
            yield f"the link {target} leads nowhere."
        elif anchor and (not file or file.endswith(".ipynb")):
            there = nbformat.read(path.parent / file, as_version=4) if file else notebook
            if anchor not in _anchors(there):
                yield f"the link {target} leads to no heading of that notebook."


def _anchors(notebook):
    """The names JupyterLab gives to headings: their text, with - for each space."""
    texts = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ +(.*?) *$", texts, re.MULTILINE)
    return {re.sub(r"[`*]", "", heading).replace(" ", "-") for heading in headings}
