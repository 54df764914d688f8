"""Figures: a notebook shows them as pictures, whether pyplot was imported or not."""

import pickle
import subprocess
import sys

from mionnx.view import empty_figure, new_figure

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_figure_is_a_picture_in_a_notebook():
    """FINDINGS, part 2, 4: the last line of a cell printed `<Figure size 600x386 with 2 Axes>`."""
    figure, axes = new_figure(3, 2)
    empty = figure._repr_png_()
    axes.plot([0, 1])
    assert empty.startswith(PNG)
    assert figure._repr_png_() != empty
    again = pickle.loads(pickle.dumps(figure))
    assert again._repr_png_() == figure._repr_png_()


def test_pyplot_is_not_imported_for_it():
    code = "import sys; from mionnx.view import empty_figure; empty_figure(1, 1)._repr_png_()"
    code += "; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert empty_figure(2, 1).get_size_inches().tolist() == [2, 1]
