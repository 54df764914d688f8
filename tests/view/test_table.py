"""Tables as text."""

import pytest
from rich.console import Console

from mionnx.view import Table


@pytest.fixture
def table() -> Table:
    table = Table("hook point", "value", title="what was found")
    table.add_row("blocks.0.hook_resid_post", "[bold]0.5[/bold]")
    return table


def test_a_printed_table_is_the_table(table, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print(table)
    printed = capsys.readouterr().out
    assert "rich.table" not in printed
    assert "hook point" in printed
    assert "│ 0.5 " in printed
    assert "\x1b" not in printed
    assert repr(table) == printed.rstrip("\n")


@pytest.mark.parametrize("width", [24, 80])
def test_it_is_as_wide_as_the_terminal_at_most(table, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, str(table).splitlines())) <= width


@pytest.mark.parametrize(("width", "shown"), [(80, "value"), (30, "number"), (12, "only")])
def test_the_first_form_that_fits_is_shown(table, monkeypatch, width, shown):
    table.narrower = Table("hook point", "number")
    table.narrower.add_row("0.resid_post", "0.5")
    table.narrower.narrower = Table("only")
    monkeypatch.setenv("COLUMNS", str(width))
    assert [word for word in ("value", "number", "only") if word in str(table)] == [shown]
    assert table.natural_width == 36


def test_rich_takes_it_as_its_own(table):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    assert captured.get().rstrip("\n") == str(table)
