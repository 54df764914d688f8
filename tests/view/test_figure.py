"""Figures: a notebook shows them as pictures, whether pyplot was imported or not."""

import base64
import pickle
import subprocess
import sys

import pytest
from repository import REPOSITORY

from mionnx.view.figure import empty_figure

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_figure_is_a_picture_in_a_notebook():
    """FINDINGS, part 2, 4: the last line of a cell printed `<Figure size 600x386 with 2 Axes>`."""
    figure = empty_figure(3, 2)
    axes = figure.subplots()
    empty = figure._repr_png_()
    axes.plot([0, 1])
    assert empty.startswith(PNG)
    assert figure._repr_png_() != empty
    again = pickle.loads(pickle.dumps(figure))
    assert again._repr_png_() == figure._repr_png_()


def test_pyplot_is_not_imported_for_it():
    code = "import sys; from mionnx.view.figure import empty_figure; empty_figure(1, 1)._repr_png_()"
    code += "; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert empty_figure(2, 1).get_size_inches().tolist() == [2, 1]


@pytest.mark.slow
def test_a_notebook_shows_figures_and_bars():
    """In a real kernel; FINDINGS, part 2, 4 and 5."""
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    model = f"m = MIModel.from_pretrained({str(REPOSITORY / 'models' / 'world-llama')!r})"
    swept = "m.patch_sweep('The capital of France is', 'The capital of Italy is', progress={})"
    cells = [f"from mionnx import MIModel\n{model}\nswept = {swept.format(False)}", "swept.figure()"]
    cells += [f"again = {swept.format(True)}"]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    quiet, figure, told = (cell.outputs for cell in notebook.cells)
    assert not quiet
    assert base64.b64decode(figure[0].data["image/png"]).startswith(PNG)
    assert '<progress value="20" max="20"></progress> cells 20 of 20' in told[0].data["text/html"]
