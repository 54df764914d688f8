// A heat map as a table: a row of column labels, and a row of coloured cells for each row label.
PANELS.HeatMap = (part, panel, beside) => {
  const names = Object.keys(panel.axes), labels = Object.values(panel.axes), rank = names.length;
  const rows = rank > 1 ? labels[0] : [""], columns = labels[rank - 1], between = names.slice(1, rank - 1);
  const measures = Object.keys(panel.colours), index = between.map(() => 0), worded = panel.words.length > 0;
  const [NUMBER, SMALLEST] = beside > 1 ? [26, 8] : [38, 14];
  const table = element("table", undefined, "heat"), scale = element("div"), controls = element("p");
  let measure = measures[0], cells = [], heads = [];

  // The cell of an array with the axes of the map; of one axis, the row is left out.
  const at = (array, row, column) => (rank > 1 ? [row, ...index, column] : [column]).reduce((inner, i) => inner[i], array);
  const largest = (array) => Array.isArray(array) ? array.reduce((most, one) => Math.max(most, largest(one)), 0) : Math.abs(array ?? 0);
  const limits = Object.fromEntries(measures.map((name) => [name, panel.limits[name] ?? (largest(panel.colours[name]) || 1e-9)]));

  function colour(value) {
    const limit = limits[measure];
    if (panel.diverging) return diverging(value, limit);
    const turn = panel.logarithmic.includes(measure) ? (x) => Math.log10(1 + x) : (x) => x;
    return sequential(value === null ? null : turn(value), 0, turn(limit));
  }

  // A choice opens on the map with the largest number.
  function open() {
    const sizes = labels.slice(1, rank - 1).map((one) => one.length), count = sizes.reduce((product, size) => product * size, 1);
    let most = -1, best;
    for (let number = 0; number < count; number++) {
      let rest = number;
      sizes.forEach((size, i) => { index[i] = rest % size; rest = Math.floor(rest / size); });
      rows.forEach((_, r) => columns.forEach((_, c) => {
        const size = Math.abs(at(panel.colours[measure], r, c) ?? 0);
        if (size > most) { most = size; best = [...index]; }
      }));
    }
    index.splice(0, index.length, ...best ?? []);
  }

  // The cells fill the window: as wide as they can be, and without numbers where these would not fit.
  const across = () => ((innerWidth - 60) / beside - (beside > 1 ? 110 : 130)) / columns.length;
  const box = element("input");
  box.type = "checkbox";
  box.checked = across() >= NUMBER;

  function sizes() {
    if (worded) return [104, 22];
    if (beside === 1) return [Math.floor(Math.min(200, Math.max(box.checked ? NUMBER : SMALLEST, across() - 1))),
      Math.floor(Math.min(44, Math.max(20, (innerHeight - 330) / rows.length)))];
    const room = Math.max(across(), 200 / columns.length);
    return Array(2).fill(Math.max(SMALLEST, Math.floor(Math.min(44, room - 1, 640 / rows.length))));
  }

  function text(r, c) {
    if (worded) return visible(panel.words[panel.ids[r][c][0]]);
    return (beside === 1 ? box.checked : sizes()[0] >= NUMBER) ? brief(at(panel.colours[measure], r, c), limits[measure]) : undefined;
  }

  function draw() {
    const [wide, high] = sizes(), longest = Math.max(...columns.map((label) => label.length));
    table.style.setProperty("--wide", wide + "px");
    table.style.setProperty("--high", high + "px");
    table.className = "heat" + (worded ? " worded" : wide < 7 * longest ? " upright" : "") + (wide < 28 ? " tiny" : "") +
      (wide >= 60 && high >= 26 && !worded ? " large" : "");
    // Every nth label, so that they do not run into each other.
    const every = (i, size, least) => i % Math.max(1, Math.ceil(least / size)) === 0;
    const top = element("tr"), kind = panel.heading ? "" : " token";
    heads = columns.map((label, i) => {
      const head = element("th", undefined, "across" + kind);
      head.append(element("span", every(i, wide, 14) ? visible(label) : ""));
      head.title = label;
      return head;
    });
    top.append(element("th", rank > 1 ? names[0] + " \\ " + names[rank - 1] : names[0], "side"), ...heads);
    cells = rows.map((_, r) => columns.map((_, c) => {
      const cell = element("td", text(r, c), kind);
      [cell.dataset.row, cell.dataset.column] = [r, c];
      return cell;
    }));
    panel.marked.forEach(([r, c]) => cells[r][c].classList.add("marked"));
    const lines = rows.map((label, r) => {
      const line = element("tr");
      line.append(element("th", every(r, high, 14) ? visible(label) : "", "side" + kind), ...cells[r]);
      return line;
    });
    const numbers = element("tr");
    if (panel.numbers.length) numbers.append(element("th", "position", "side"), ...panel.numbers.map((number) => element("th", number)));
    table.replaceChildren(top, numbers, ...lines);
    shade();
  }

  function shade() {
    cells.forEach((line, r) => line.forEach((cell, c) => paint(cell, colour(at(panel.colours[measure], r, c)))));
    const logarithmic = panel.logarithmic.includes(measure) ? ", logarithmic" : "";
    scale.replaceChildren(scaleBar(panel.diverging ? -limits[measure] : 0, limits[measure], colour, measure + logarithmic));
  }

  function describe(r, c) {
    const places = (rank > 1 ? [[names[0], rows[r]]] : []).concat(between.map((name, i) => [name, labels[i + 1][index[i]]]),
      [[names[rank - 1], columns[c]]]).map(([name, label]) => name + " " + visible(label));
    const words = worded ? panel.ids[r][c].map((id, n) => spelled(panel.shares[r][c][n]).padEnd(10) + visible(panel.words[id])) : [];
    const numbers = Object.entries({ ...panel.hover, ...panel.colours }).map(([name, array]) => {
      const value = Array.isArray(array) ? at(array, r, c) : array;
      return name + ": " + (typeof value === "string" ? visible(value) : spelled(value));
    });
    return [...places, ...words, ...numbers].join("\n");
  }

  if (between.length) open();
  between.forEach((name, i) => controls.append(selection(name, labels[i + 1].map(visible), index[i], (entry) => { index[i] = entry; draw(); }).label));
  if (measures.length > 1) controls.append(selection("colour", measures, 0, (i) => { measure = measures[i]; shade(); }).label);
  if (!worded && beside === 1) {
    const label = element("label");
    label.append(box, " numbers in the cells");
    controls.append(label);
  }
  const scroll = element("div", undefined, "scroll");
  scroll.append(table);
  part.append(controls, scroll, scale);
  explain(table, ({ target }) => {
    const cell = target.closest("td");
    return cell ? describe(Number(cell.dataset.row), Number(cell.dataset.column)) : "";
  });
  box.addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
  if (!panel.chooses) return;
  table.addEventListener("click", ({ target }) => {
    const cell = target.closest("td");
    if (cell) choose(Number(cell.dataset.column));
  });
  followers.push((option) => heads.forEach((head, c) => head.classList.toggle("chosen", c === option)));
  // The chosen column is in view: a long text opens where the panels below are.
  const head = heads[chosen];
  scroll.scrollLeft = head.offsetLeft + head.offsetWidth / 2 - scroll.clientWidth / 2;
};
