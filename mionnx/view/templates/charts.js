// Bars, curves and graphs.
PANELS.Bars = (part, panel) => {
  const all = panel.labels.map((label, place) => ({ label, value: panel.values[place], place }));
  const limit = Math.max(...panel.values.map(Math.abs)) || 1, total = panel.values.reduce((sum, value) => sum + value, 0);
  const size = (one) => -Math.abs(one.value), box = element("div", undefined, "bars"), MOST = [25, 50, Infinity];
  let order = 0, most = MOST[0];

  function draw() {
    let shown = [...all].sort((a, b) => size(a) - size(b)).slice(0, most);
    if (order) shown.sort((a, b) => a.place - b.place);
    box.replaceChildren(...shown.flatMap(({ label, value, place }) => {
      const track = element("div", undefined, "track"), bar = element("i"), axis = element("i"), width = 50 * Math.abs(value) / limit;
      Object.assign(bar.style, { left: (value < 0 ? 50 - width : 50) + "%", width: Math.max(width, .2) + "%",
        background: value < 0 ? mix(BLUE, BLUE, 0) : mix(RED, RED, 0) });
      Object.assign(axis.style, { left: "50%", width: "1px", background: "var(--line)" });
      track.append(axis, bar);
      explain(track, () => label + ": " + spelled(value) + " " + panel.unit + ", " + spelled(100 * value / total) + " % of the sum" +
        (panel.errors ? "; standard error " + spelled(panel.errors[place]) : ""));
      return [element("div", label, "name"), track, element("div", spelled(value), "number")];
    }));
  }
  const orders = ["largest first", panel.order];
  part.append(selection("order", orders, 0, (i) => { order = i; draw(); }).label,
    selection("show", ["25", "50", "all"], 0, (i) => { most = MOST[i]; draw(); }).label, box);
  draw();
};

function ticks(low, high) {
  const rough = (high - low) / 5 || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough), places = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) places.push(i * step);
  return places;
}

PANELS.Lines = (part, panel, beside) => {
  const { across, series } = panel, named = across.some((one) => typeof one === "string"), logarithmic = panel.scale === "log";
  const longest = named ? Math.max(0, ...across.map((name) => name.length)) : 0, turned = longest > 8;
  const LEFT = 64, TOP = 24, TALL = turned ? 300 : 230, BELOW = turned ? 20 + 5.9 * longest : 42;
  const room = (innerWidth - 20 - 40 * beside) / beside - 94;
  const WIDE = turned ? Math.max(900, 18 * across.length) : Math.max(220, Math.min(beside > 1 ? 474 : named ? 1040 : 640, room));
  const hidden = new Set(), box = element("div", undefined, "scroll"), legend = element("p", undefined, "legend");

  const place = (value) => panel.spaced === "log" ? Math.log10(1 + value) : value;
  const places = across.map((value, i) => named ? i : place(value)), first = Math.min(...places), last = Math.max(...places);
  const alone = named && across.length < 2;
  const right = (value) => LEFT + (alone ? WIDE / 2 : (value - first) / (last - first || 1) * WIDE);
  const values = series.flatMap((one) => one.values).concat(Object.values(panel.levels)).filter((value) => value !== null);
  const ends = [panel.low ?? Math.min(0, ...values), panel.high ?? (Math.max(...values, 1e-6) * 1.05)];
  // What is not finite lies above everything.
  const [low, high] = logarithmic ? [Math.log10(ends[0]), Math.ceil(Math.log10(Math.max(...values, ends[0] * 10)) + .2)] :
    [Math.min(ends[0], ...values), Math.max(ends[1], ...values)];
  const turn = (value) => logarithmic ? (value === null ? high : Math.log10(Math.max(value, ends[0]))) : value;
  const up = (value) => TOP + TALL * (high - turn(value)) / (high - low || 1);
  const colour = (n) => `var(--c${(series.slice(0, n + 1).filter((one) => !one.dotted).length - 1) % 8})`;
  const shown = (n) => !hidden.has(series[n].dotted ? series.slice(0, n).findLastIndex((one) => !one.dotted) : n);

  const pointer = shape("line", { class: "pointer", y1: TOP, y2: TOP + TALL });
  const nearest = (event) => {
    const x = event.clientX - box.firstChild.getBoundingClientRect().left;
    return places.reduce((best, one, i) => Math.abs(right(one) - x) < Math.abs(right(places[best]) - x) ? i : best, 0);
  };

  function grid(svg) {
    svg.append(shape("text", { x: LEFT, y: 12 }, panel.vertical));
    const powers = Array.from({ length: Math.max(0, high - Math.ceil(low) + 1) }, (_, i) => 10 ** (Math.ceil(low) + i));
    for (const value of logarithmic ? powers : ticks(low, high)) {
      svg.append(shape("line", { x1: LEFT, x2: LEFT + WIDE, y1: up(value), y2: up(value), class: "axis" }));
      svg.append(shape("text", { x: LEFT - 8, y: up(value) + 4, "text-anchor": "end" },
        logarithmic ? "1e" + Math.round(Math.log10(value)) : spelled(value)));
    }
    for (const [name, level] of Object.entries(panel.levels)) {
      svg.append(shape("line", { x1: LEFT, x2: LEFT + WIDE, y1: up(level), y2: up(level), class: "level" }));
      svg.append(shape("text", { x: LEFT + WIDE, y: up(level) - 4, "text-anchor": "end" }, name));
    }
    const linear = !named && panel.spaced !== "log", foot = TOP + TALL + 16;
    const labels = linear ? ticks(first, last).map((value) => [right(value), spelled(value)]) :
      across.map((label, i) => [right(places[i]), String(label)]);
    let end = -1e9;
    for (const [x, label] of labels) {
      if (x < end) continue;
      end = x + (turned ? 13 : 14 + 6.5 * label.length);
      svg.append(turned ? shape("text", { transform: `translate(${x + 4},${foot - 6}) rotate(-90)`, "text-anchor": "end" }, label) :
        shape("text", { x, y: foot, "text-anchor": "middle" }, label));
    }
    svg.append(shape("text", { x: LEFT + WIDE / 2, y: TOP + TALL + BELOW - 6, "text-anchor": "middle" }, panel.unit));
  }

  function curve(one, n) {
    const group = shape("g", { class: panel.chooses === "series" && n !== chosen ? "dim" : "" });
    const points = one.values.map((value, i) => value === null && !logarithmic ? null : [right(places[i]), up(value)]);
    const steps = points.map((point, i) => point && (points[i - 1] ? "L " : "M ") + point.map((x) => x.toFixed(1)).join(" "));
    group.append(shape("path", { d: steps.filter(Boolean).join(" "), stroke: colour(n), class: one.dotted ? "dotted" : "" }));
    for (const mark of one.marks.map(place).filter((mark) => mark >= first && mark <= last))
      group.append(shape("line", { x1: right(mark), x2: right(mark), y1: TOP, y2: TOP + TALL, stroke: colour(n), "stroke-dasharray": "2 3" }));
    if (!one.dotted) points.forEach((point, i) => point && group.append(shape("circle", { cx: point[0], cy: point[1], fill: colour(n),
      r: panel.chooses === "points" && i === chosen ? 6 : points.length > 60 ? 2.5 : 3.5 })));
    return group;
  }

  function draw() {
    const svg = shape("svg", { width: LEFT + WIDE + 30, height: TOP + TALL + BELOW, role: "img" });
    grid(svg);
    const order = series.map((_, n) => n).filter(shown);
    if (panel.chooses === "series") order.sort((a, b) => (a === chosen) - (b === chosen));
    svg.append(...order.map((n) => curve(series[n], n)), pointer);
    if (panel.chooses === "points") svg.style.cursor = "pointer";
    box.replaceChildren(svg);
  }

  explain(box, (event) => {
    if (!across.length) return "";
    const i = nearest(event), x = right(places[i]);
    pointer.setAttribute("x1", x);
    pointer.setAttribute("x2", x);
    pointer.style.visibility = "visible";
    const lines = series.flatMap((one, n) => !shown(n) || (panel.chooses === "series" && n !== chosen) ? [] :
      [one.notes[i] ?? one.name + ": " + (one.values[i] === null && logarithmic ? "∞" : spelled(one.values[i]))]);
    return [named ? across[i] : panel.unit + " " + spelled(across[i]), ...lines].join("\n");
  });
  box.addEventListener("mouseleave", () => { pointer.style.visibility = "hidden"; });
  if (panel.chooses) followers.push(draw);
  if (panel.chooses === "points") box.addEventListener("click", (event) => choose(nearest(event)));
  const legends = panel.legend && panel.chooses !== "series";
  if (legends) series.forEach((one, n) => {
    if (one.dotted) return;
    const label = element("label"), check = element("input"), line = element("i");
    check.type = "checkbox";
    check.checked = true;
    check.addEventListener("change", () => { check.checked ? hidden.delete(n) : hidden.add(n); draw(); });
    line.style.background = colour(n);
    label.append(check, line, element("span", one.name, "token"));
    legend.append(label);
  });
  part.append(...legends ? [legend] : [], box);
  draw();
};

PANELS.Graph = (part, panel) => {
  const STEP = 62, LEVEL = 54, node = (label) => label.split("<")[0];
  const heading = element("h2"), picture = element("div", undefined, "scroll graph"), list = element("div", undefined, "tall");
  const row = element("div", undefined, "row");
  row.append(picture, list);
  part.prepend(heading);
  part.append(row);

  function draw() {
    const size = panel.sizes[chosen], edges = panel.edges.slice(0, size);
    heading.textContent = size > edges.length ? `The ${edges.length} leading of ${size} edges` : `The circuit of ${size} edges of ${panel.most}`;
    const names = [...new Set(edges.flatMap(([from, to]) => [node(from), node(to)]))];
    const levels = [...new Set(names.map((name) => panel.places[name][1]))].sort((a, b) => a - b);
    const rows = levels.map((level) => names.filter((name) => panel.places[name][1] === level)
      .sort((a, b) => panel.places[a][0] - panel.places[b][0]));
    const wide = STEP * Math.max(1, ...rows.map((one) => one.length)) + 150;
    const high = LEVEL * Math.max(1, levels.length) + 20, at = {};
    rows.forEach((one, i) => one.forEach((name, j) => {
      at[name] = [name.includes(".") ? (wide - 80) / 2 + STEP * (j - (one.length - 1) / 2 + .2 * (i % 2)) : wide - 40, high - 30 - LEVEL * i];
    }));
    const svg = shape("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img" });
    const limit = Math.max(1e-12, ...edges.map((edge) => Math.abs(edge[2])));
    const lines = edges.map(([from, to, score]) => {
      const [a, b] = [at[node(from)], at[node(to)]], strength = Math.abs(score) / limit;
      const line = shape("line", { x1: a[0], y1: a[1], x2: b[0], y2: b[1], stroke: score > 0 ? mix(RED, RED, 0) : mix(BLUE, BLUE, 0),
        "stroke-width": .7 + 4 * strength, "stroke-opacity": .3 + .7 * strength });
      explain(line, () => from + " → " + to + "\n" + spelled(score));
      return [line, node(from), node(to)];
    });
    svg.append(...lines.map(([line]) => line).reverse());
    for (const [one, other] of panel.shared) if (at[one] && at[other])
      svg.append(shape("path", { d: `M ${at[one].join(" ")} L ${at[other].join(" ")}`, class: "shared" }));
    for (const name of names) {
      const [x, y] = at[name], group = shape("g", {});
      group.append(shape("rect", { x: x - 25, y: y - 10, width: 50, height: 20, rx: 5 }), shape("text", { x, y: y + 4, "text-anchor": "middle" }, name));
      const alone = (only) => lines.forEach(([line, from, to]) => line.setAttribute("class", only && from !== name && to !== name ? "dim" : ""));
      group.addEventListener("mouseenter", () => alone(true));
      group.addEventListener("mouseleave", () => alone(false));
      svg.append(group);
    }
    picture.replaceChildren(svg);
    list.replaceChildren();
    const rowsOf = edges.map(([from, to, score]) => [[from, ""], [to, "token"], [spelled(score), ""]]);
    PANELS.Table(list, { heads: ["sender", "receiver", "adds to " + panel.unit], rows: rowsOf, styles: { receiver: "token" } });
  }
  followers.push(draw);
};
