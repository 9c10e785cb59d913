"""What a notebook of the series defines, for tests of its claims: one source, no copies."""

import ast
import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def definitions(number):
    """Imports, functions, classes and the exercises' solutions of notebook `number`, as a dict.

    Nothing else of it runs. A name that is defined twice, as a stub and its solution are, has its
    last definition.
    """
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
            exec(compile(tree, path.name, "exec"), names)
    return names
