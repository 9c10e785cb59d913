"""Every notebook in the program its readers use: JupyterLab, started by course.py, in Chromium."""

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from PIL import Image

from tools import notebooks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason='needs the extra "ci": pip install -e ".[ci]"'
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)"),
]

NOTEBOOK = "window.jupyterapp.shell.currentWidget"
IS_READY = f"""() => window.jupyterapp
    && {NOTEBOOK}?.sessionContext?.session?.kernel?.status === "idle" """
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
SHOW_CONTENTS = "() => window.jupyterapp.commands.execute('toc:show-panel')"
CELLS = f"() => {NOTEBOOK}.content.model.sharedModel.cells.map(cell => cell.toJSON())"
# Without it JupyterLab keeps only the visible cells in the page.
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"}}
# The user's own settings and open notebooks are neither used nor touched.
OWN_FOLDERS = ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab as `course.py lab` starts it, in a copy of the course; yields its address."""
    course = tmp_path_factory.mktemp("browser") / "course"
    ignore = shutil.ignore_patterns(".venv", ".git", "*cache*", "*.egg-info")
    shutil.copytree(notebooks.ROOT, course, ignore=ignore)
    for name, values in SETTINGS.items():
        file = course / f".{OWN_FOLDERS[0]}" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    port = free_port()
    command = [sys.executable, "course.py", "lab", "00", f"--port={port}", "--no-browser"]
    command += [
        "--IdentityProvider.token=",
        "--expose-app-in-browser",
        "--ServerApp.port_retries=0",
    ]
    settings = {name: str(course / f".{name}") for name in OWN_FOLDERS} | {"OMP_NUM_THREADS": "1"}
    log = open(course / "server.log", "w")  # noqa: SIM115
    process = subprocess.Popen(
        command, cwd=course, env={**os.environ, **settings}, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process, course / "server.log")
        yield address
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def wait_for(address, process, log):
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{address}/api", timeout=5)
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.5)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=notebooks.every(), ids=lambda path: path.stem)
def page(request, server, browser):
    """The notebook, opened and run from top to bottom; `page.said` are the console's errors."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.said = []
    opened.on("console", lambda line: line.type == "error" and opened.said.append(line.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.stored = nbformat.read(request.param, as_version=4)
    # A workspace of its own: in a common one JupyterLab opens the notebooks before it again.
    address = f"{server}/lab/workspaces/{request.param.stem}/tree/notebooks/{request.param.name}"
    opened.goto(address, wait_until="domcontentloaded")
    opened.wait_for_function(IS_READY, timeout=120_000)
    # JupyterLab refuses while it is still setting a notebook up; errors are looked for below.
    assert any(opened.evaluate(RUN_ALL) or time.sleep(3) for _ in range(5))
    yield opened
    opened.close()


def outputs_of(page):
    for cell in page.evaluate(CELLS):
        for output in cell.get("outputs", []):
            yield cell, output


def test_it_runs_without_an_error_that_is_not_meant(page):
    for cell, output in outputs_of(page):
        meant = "raises-exception" in cell["metadata"].get("tags", [])
        assert output["output_type"] != "error" or meant, output
        assert output.get("name") != "stderr", output
    assert page.said == []


def test_every_figure_is_there_and_shows_something(page):
    pictures = [
        o["data"]["image/png"] for _, o in outputs_of(page) if "image/png" in o.get("data", {})
    ]
    for picture in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        assert image.width > 500 and len(image.getcolors(256)) > 4
    images = page.locator(".jp-OutputArea img")
    assert images.count() == len(pictures) > 0
    assert all(image.evaluate("e => e.naturalWidth > 500") for image in images.all())


def test_the_exercises_are_not_attempted_and_their_solutions_pass(page):
    texts = ["".join(o.get("data", {}).get("text/plain", "")) for _, o in outputs_of(page)]
    stubs = [text for text in texts if ": not attempted" in text]
    solved = [text for text in texts if ": correct" in text and ": not" not in text]
    assert len(stubs) == len(solved) > 0


def test_solutions_are_collapsed_and_open_on_a_click(page):
    buttons = page.locator(".jp-MarkdownCell button.jp-showHiddenCellsButton")
    headings = [c for c in page.stored.cells if c.metadata.get("jp-MarkdownHeadingCollapsed")]
    assert buttons.count() == len(headings) > 0
    code = page.locator(".jp-CodeCell:visible").count()
    buttons.first.click()
    assert page.locator(".jp-CodeCell:visible").count() > code


def test_details_open_on_a_click(page):
    details = page.locator(".jp-RenderedMarkdown details")
    assert details.count() == sum(cell.source.count("<details") for cell in page.stored.cells)
    first = details.first
    first.locator("summary").first.click()
    assert first.evaluate("e => e.open && e.innerText.trim().split(/\\s+/).length > 5")


def test_the_table_of_contents_has_every_section(page):
    page.evaluate(SHOW_CONTENTS)
    contents = page.locator("#table-of-contents .jp-tocItem-content")
    contents.first.wait_for()
    shown = [text.strip() for text in contents.all_inner_texts()]
    lines = [
        line
        for c in page.stored.cells
        if c.cell_type == "markdown"
        for line in c.source.split("\n")
    ]
    sections = [line.lstrip("# ") for line in lines if line.startswith(("# ", "## "))]
    assert [title for title in shown if title in sections] == sections
