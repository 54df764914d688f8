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


def test_rich_takes_it_as_its_own(table):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    assert captured.get().rstrip("\n") == str(table)
