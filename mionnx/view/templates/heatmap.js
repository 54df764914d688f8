// Fills a table of the class "heat": a row of column labels, and a row of coloured cells for each row label.
//   corner: the text above the row labels;
//   colour(row, column), text(row, column): a cell's colour, and its text if cells have one;
//   kind: a class of the labels and cells ("token");
//   foot: whether the column labels stand below the cells.
// Returns the elements: { heads: [column], cells: [row][column] }.
function heatMap(table, { corner, rows, columns, colour, text, kind = "", foot }) {
  const top = element("tr"), heads = columns.map((label) => {
    const head = element("th", undefined, "across " + kind);
    head.append(element("span", label));
    head.title = label;
    return head;
  });
  top.append(element("th", corner, "side"), ...heads);
  const cells = rows.map((_, r) => columns.map((_, c) => {
    const cell = paint(element("td", text && text(r, c), kind), colour(r, c));
    [cell.dataset.row, cell.dataset.column] = [r, c];
    return cell;
  }));
  const lines = rows.map((label, r) => {
    const line = element("tr");
    line.append(element("th", label, "side " + kind), ...cells[r]);
    return line;
  });
  table.replaceChildren(...(foot ? [...lines, top] : [top, ...lines]));
  return { heads, cells };
}

// Shows what `text(row, column)` gives while the pointer is over a cell of a heat map.
function explainCells(table, text) {
  explain(table, ({ target }) => {
    const cell = target.closest("td");
    return cell ? text(Number(cell.dataset.row), Number(cell.dataset.column)) : "";
  });
}

// The colours of a scale, from left to right, as a background.
function gradient(colours) { return `linear-gradient(to right, ${colours.join(",")})`; }
