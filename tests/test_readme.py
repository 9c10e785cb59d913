"""The README: its figure is the notebook's, its links and its map of the series are right."""

import re

import nbformat

from tools import notebooks

TEXT = (notebooks.ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figure_is_the_first_of_notebook_00():
    incident = nbformat.read(notebooks.find("00"), as_version=4)
    assert notebooks.README_FIGURE.read_bytes() == notebooks.first_figure(incident)


def test_every_link_leads_to_a_file():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    missing = [link for link in links if not (notebooks.ROOT / link).exists()]
    assert len(links) > 10 and missing == []


def test_the_map_lists_every_notebook_with_its_minutes():
    rows = dict(re.findall(r"\]\(notebooks/(\S+)\).*\| (\d+) \|$", TEXT, re.MULTILINE))
    assert list(rows) == [path.name for path in notebooks.every()]
    for name, minutes in rows.items():
        first = nbformat.read(notebooks.NOTEBOOKS / name, as_version=4).cells[0].source
        assert f"{minutes} minutes" in first, name
