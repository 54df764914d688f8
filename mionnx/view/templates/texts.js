// Tables, tokens with scores, and texts with marks.
PANELS.Table = (part, { heads, rows, styles = {}, chooses, most = rows.length }) => {
  const table = element("table", undefined, "plain" + (chooses ? " choices" : "")), scroll = element("div", undefined, "scroll");
  const kinds = heads.map((head) => styles[head] ?? ""), lines = [];

  function cell([text, style], c) {
    const kind = kinds[c], one = element("td", kind === "token" ? visible(text) : text, [kind, style].join(" ").trim());
    if (kind === "share" && text && !isNaN(text)) paint(one, sequential(Number(text), 0, 1));
    return one;
  }

  function draw(count) {
    const head = element("tr");
    head.append(...heads.map((text, c) => element("th", text, kinds[c])));
    lines.splice(0, lines.length, ...rows.slice(0, count).map((row, r) => {
      const line = element("tr");
      line.append(...row.map(cell));
      if (chooses) line.addEventListener("click", () => choose(r));
      if (chooses === "series") {
        const dot = element("span", undefined, "dot");
        dot.style.background = `var(--c${r % 8})`;
        line.firstChild.prepend(dot);
      }
      return line;
    }));
    table.replaceChildren(head, ...lines);
  }
  draw(most);
  scroll.append(table);
  part.append(scroll);
  if (rows.length > most) {
    const more = element("button", "show all");
    more.addEventListener("click", () => { draw(rows.length); more.remove(); });
    part.append(more);
  }
  if (chooses) followers.push((option) => lines.forEach((line, r) => { line.className = r === option ? "chosen" : ""; }));
};

PANELS.Text = (part, panel) => {
  const { tokens, scores, chips } = panel, line = element("div", undefined, "text"), facts = element("p", undefined, "faint");
  const option = () => panel.chooses ? chosen : 0, score = (place) => scores[option()]?.[place] ?? null;
  const spans = tokens.map((token, place) => {
    const span = element("span", visible(token), "token" + (place === panel.here ? " here" : ""));
    explain(span, () => "position " + place + (scores.length ? "\n" + (panel.chooses ? data.choice + " " + data.options[chosen] : panel.unit) + ": " + spelled(score(place)) : ""));
    line.append(span, document.createTextNode(" "));
    return span;
  });
  const strongest = Math.max(1e-9, ...chips.flat().map(([, value]) => value)), all = [], table = element("table", undefined, "plain chips");
  const rows = chips.map((some, place) => {
    const row = element("tr"), last = element("td");
    row.append(element("td", String(place), "faint"), element("td", visible(tokens[place]), "token"), last);
    some.forEach(([number, value]) => {
      const chip = paint(element("span", data.options[number] + " ", "chip"), sequential(value, 0, strongest));
      chip.append(element("small", spelled(value)));
      chip.addEventListener("click", () => choose(number));
      all.push([number, chip]);
      last.append(chip);
    });
    if (!some.length) last.append(element("span", "none", "faint"));
    table.append(row);
    return row;
  });

  function draw() {
    if (!scores.length) return;
    const values = tokens.map((_, place) => score(place)), limit = panel.limit ?? Math.max(1e-12, ...values.map((value) => Math.abs(value ?? 0)));
    spans.forEach((span, place) => {
      const value = values[place], blank = !panel.diverging && !(value > panel.least);
      span.style.background = span.style.color = "";
      if (!blank) paint(span, panel.diverging ? diverging(value, limit) : sequential(value, 0, limit));
      if (rows[place]) rows[place].className = blank ? "" : "here";
    });
    for (const [number, chip] of all) chip.classList.toggle("chosen", number === option());
    facts.textContent = panel.facts[option()] ?? "";
  }
  if (panel.chooses) part.append(chooser());
  part.append(line, facts);
  if (chips.length) part.append(element("h2", "Largest at each token"), table);
  if (panel.chooses) followers.push(draw);
  if (panel.legend) part.append(scaleBar(-panel.limit, panel.limit, (value) => diverging(value, panel.limit), panel.unit));
  draw();
};

PANELS.MarkedText = (part, { pieces, labels }) => {
  const line = element("div", undefined, "text marked");
  for (const [words, label, share] of pieces) {
    if (!label) { line.append(document.createTextNode(words)); continue; }
    const mark = element("mark", words);
    mark.style.setProperty("--hue", `var(--c${labels.indexOf(label) % 8})`);
    mark.append(element("small", label));
    explain(mark, () => label + ": " + spelled(share));
    line.append(mark);
  }
  part.append(line);
};

PANELS.Examples = (part, panel) => {
  const box = element("div");
  part.append(box);
  function draw() {
    const texts = panel.texts[chosen], limit = Math.max(1e-9, ...texts.flatMap(([, values]) => values).map((value) => value ?? 0));
    box.replaceChildren(...texts.map(([tokens, values, peak]) => {
      const line = element("p", undefined, "text");
      tokens.forEach((token, place) => {
        const span = element("span", visible(token), "token" + (place === peak ? " here" : ""));
        if (values[place] > 0) paint(span, sequential(values[place], 0, limit));
        explain(span, () => "activation " + spelled(values[place] ?? 0));
        line.append(span, document.createTextNode(" "));
      });
      return line;
    }));
    if (!texts.length) box.append(element("p", "active nowhere", "faint"));
  }
  followers.push(draw);
  draw();
};
