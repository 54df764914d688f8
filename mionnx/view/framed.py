"""`Framed`: results whose cells are rows of a pandas DataFrame."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from mionnx.errors import RuntimeMissingError
from mionnx.view.shown import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


class Framed(Shown):
    """A result that has a number, or several, for each of its cells."""

    @abstractmethod
    def _columns(self) -> Columns:
        """The columns of the frame by name; integers of which some are None are a list."""

    def to_frame(self) -> "DataFrame":
        """The result in long form as a pandas DataFrame, a row for each cell and pair.

        Raises:
            RuntimeMissingError: pandas is not installed.

        Example:
            sweep.to_frame().query("layer == 23").groupby("head").effect.mean()
        """
        try:
            from pandas import DataFrame, array
        except ImportError as error:
            raise RuntimeMissingError("to_frame makes a DataFrame of pandas: pip install pandas") from error
        # A layer or head that is not there for each cell is missing (<NA>), and the others stay integers.
        columns = self._columns().items()
        gaps = {name for name, one in columns if isinstance(one, list) and None in one}
        return DataFrame({name: array(one, "Int64") if name in gaps else one for name, one in columns})
