// Attribution graphs: tokens across, layers up.
PANELS.Trace = (part, panel) => {
  const nodes = panel.nodes.map(([name, kind, layer, position, label, influence, activation, group, words], id) =>
    ({ id, name, kind, layer, position, label, influence, activation, group, words }));
  const inner = nodes.filter((one) => one.kind === "feature" || one.kind === "error").sort((a, b) => b.influence - a.influence);
  const most = Math.max(1e-12, ...inner.map((one) => one.influence)), pinned = new Set();
  let selected = null, shownNodes = Math.min(60, inner.length), shownEdges = Math.min(400, panel.edges.length);

  const controls = element("p", undefined, "controls"), row = element("div", undefined, "row trace"), about = element("aside");
  const picture = element("div", undefined, "scroll graph"), STEP = 22, PER_ROW = 5;
  row.append(picture, about);
  part.append(controls, row);

  function slider(text, high, value, change) {
    const label = element("label", text + " "), input = element("input"), number = element("span", String(value), "faint");
    Object.assign(input, { type: "range", min: Math.min(1, high), max: high, value });
    input.addEventListener("input", () => { number.textContent = input.value; change(Number(input.value)); draw(); });
    label.append(input, " ", number);
    controls.append(label);
  }
  slider("nodes", inner.length, shownNodes, (value) => { shownNodes = value; });
  slider("edges", panel.edges.length, shownEdges, (value) => { shownEdges = value; });
  const name = element("input"), grouping = element("button", "name the pinned nodes as one");
  name.placeholder = "supernode";
  grouping.addEventListener("click", () => { for (const id of pinned) nodes[id].group = name.value; pinned.clear(); draw(); });
  controls.append(name, " ", grouping);

  const members = (one) => one.group ? nodes.filter((other) => other.group === one.group) : [one];
  const caption = (one) => one.group || (one.kind === "token" || one.kind === "logit" ? visible(one.label) : one.label);
  const where = (one) => one.kind === "logit" ? "logit" : one.kind === "token" ? "token " + one.position
    : `layer ${one.layer}, ${visible(panel.tokens[one.position])} (${one.position})`;

  function draw() {
    const alive = new Set([...inner.slice(0, shownNodes), ...nodes.filter((one) => !inner.includes(one))].map((one) => one.id));
    for (const id of pinned) alive.add(id);
    const edges = panel.edges.filter(([from, to]) => alive.has(from) && alive.has(to)).slice(0, shownEdges);
    const cells = {}, per = panel.tokens.map(() => 1), high = Array(panel.layers + 2).fill(1);
    for (const one of nodes) if (alive.has(one.id)) (cells[one.layer + "," + one.position] ??= []).push(one);
    for (const list of Object.values(cells)) {
      const { layer, position, kind } = list[0], wide = kind === "logit" ? 1 : Math.min(PER_ROW, list.length);
      per[position] = Math.max(per[position], wide);
      high[layer + 1] = Math.max(high[layer + 1], kind === "logit" ? list.length : Math.ceil(list.length / PER_ROW));
    }
    const widths = per.map((count) => Math.max(panel.tokens.length > 10 ? 62 : 76, count * STEP + 14)), left = [64], floor = [0];
    widths.forEach((wide, i) => left.push(left[i] + wide));
    high.forEach((count, i) => floor.push(floor[i] + count * STEP + 26));
    const total = [left.at(-1) + 10, floor.at(-1) + 10], at = {};
    for (const list of Object.values(cells)) list.forEach((one, i) => {
      const wide = one.kind === "logit" ? 1 : Math.min(PER_ROW, list.length), line = Math.floor(i / wide);
      const x = left[one.position] + widths[one.position] / 2 + STEP * (i % wide - (Math.min(wide, list.length - line * wide) - 1) / 2);
      at[one.id] = [x, total[1] - floor[one.layer + 1] - 20 - STEP * line];
    });
    const svg = shape("svg", { width: total[0], height: total[1], viewBox: `0 0 ${total[0]} ${total[1]}`, role: "img" });
    for (let layer = 0; layer < panel.layers; layer++) {
      const y = total[1] - floor[layer + 1] - 20;
      svg.append(shape("text", { x: 4, y: y + 4 }, "layer " + layer), shape("line", { x1: 56, x2: total[0], y1: y + 15, y2: y + 15, class: "axis" }));
    }
    const group = selected === null ? null : new Set(members(nodes[selected]).map((one) => one.id));
    const limit = Math.max(1e-12, ...edges.map((edge) => Math.abs(edge[2])));
    for (const [from, to, weight] of [...edges].reverse()) {
      const [a, b] = [at[from], at[to]], strength = Math.abs(weight) / limit, middle = (a[1] + b[1]) / 2;
      const near = !group || group.has(from) || group.has(to);
      const line = shape("path", { d: `M ${a[0]} ${a[1]} C ${a[0]} ${middle} ${b[0]} ${middle} ${b[0]} ${b[1]}`, class: near ? "" : "dim" });
      line.style.stroke = weight > 0 ? "var(--c3)" : "var(--c0)";  // of the page's colours, light and dark
      line.style.strokeWidth = .5 + 3.5 * strength;
      line.style.strokeOpacity = group && near ? .55 + .45 * strength : .1 + .8 * strength;
      explain(line, () => `${caption(nodes[from])} → ${caption(nodes[to])}\n${spelled(weight)}`);
      svg.append(line);
    }
    const joined = new Set(group ? edges.flatMap(([from, to]) => group.has(from) || group.has(to) ? [from, to] : []) : alive);
    for (const one of nodes) if (alive.has(one.id)) {
      const [x, y] = at[one.id], marks = [one.kind, group && !joined.has(one.id) && !group.has(one.id) ? "dim" : "",
        group?.has(one.id) ? "selected" : "", pinned.has(one.id) ? "pinned" : ""], box = shape("g", { class: marks.join(" "), tabindex: 0 });
      const radius = 3.5 + 6 * Math.sqrt(one.influence / most);
      if (one.kind === "feature") box.append(shape("circle", { cx: x, cy: y, r: Math.min(radius, 10) }));
      else if (one.kind === "error") box.append(shape("rect", { x: x - radius * .8, y: y - radius * .8, width: radius * 1.6, height: radius * 1.6 }));
      else {
        const text = visible(one.label), shown = text.length > 8 ? text.slice(0, 7) + "…" : text, wide = Math.max(24, 7 * shown.length + 10);
        box.append(shape("rect", { x: x - wide / 2, y: y - 10, width: wide, height: 20, rx: 5 }), shape("text", { x, y: y + 4, "text-anchor": "middle" }, shown));
      }
      if (one.group && one.kind === "feature") box.append(shape("text", { x, y: y - 12, "text-anchor": "middle", class: "named" }, one.group));
      explain(box, () => [caption(one), where(one), (one.kind === "logit" ? "probability " : "influence ") + spelled(one.influence),
        ...one.activation === null ? [] : ["activation " + spelled(one.activation)], ...one.words ? [one.words] : []].join("\n"));
      const click = () => {
        if (selected === one.id) { pinned.has(one.id) ? (pinned.delete(one.id), selected = null) : pinned.add(one.id); } else selected = one.id;
        draw();
      };
      box.addEventListener("click", click);
      box.addEventListener("keydown", (event) => { if (event.key === "Enter") click(); });
      svg.append(box);
    }
    picture.replaceChildren(svg);
    describe();
  }

  function ways(title, list) {
    about.append(element("h3", title));
    if (!list.length) { about.append(element("p", "none that is shown", "faint")); return; }
    const table = element("table", undefined, "plain choices");
    for (const [id, weight] of list.slice(0, 12)) {
      const line = element("tr"), cell = element("td", caption(nodes[id]), "token"), number = element("td", spelled(weight));
      number.className = weight > 0 ? "red" : "blue";
      line.append(cell, element("td", where(nodes[id]), "faint"), number);
      line.addEventListener("click", () => { selected = id; draw(); });
      table.append(line);
    }
    about.append(table);
  }

  function describe() {
    about.replaceChildren();
    if (selected === null) { about.append(element("p", "Click a node.", "faint")); return; }
    const one = nodes[selected], group = new Set(members(one).map((other) => other.id)), into = {}, out = {};
    for (const [from, to, weight] of panel.edges) {
      if (group.has(to) && !group.has(from)) into[from] = (into[from] ?? 0) + weight;
      if (group.has(from) && !group.has(to)) out[to] = (out[to] ?? 0) + weight;
    }
    const ranked = (table) => Object.entries(table).map(([id, weight]) => [Number(id), weight]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    about.append(element("h2", caption(one)), element("p", group.size > 1 ? group.size + " nodes" : where(one) + ", " + one.name, "faint"));
    if (one.words) about.append(element("p", one.words));
    ways("Ways in", ranked(into));
    ways("Ways out", ranked(out));
  }
  draw();
  picture.scrollLeft = picture.scrollWidth;  // what is traced stands at the last token
};
