const data = JSON.parse(document.getElementById("data").textContent);

// An element; text becomes text, never markup.
function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// An element of a drawing.
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// White space made visible, so that every token can be seen.
function visible(token) {
  const shown = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown.trim() ? shown : "␣".repeat(Math.max(1, shown.length));
}

// A number as people read it; null is what was not finite.
function spelled(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return value === 0 ? "0" : size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// A number with some decimal places; what rounds to zero has no sign. null is what was not finite.
function fixed(value, places) {
  if (value === null || value === undefined) return "–";
  const text = value.toFixed(places);
  return Number(text) === 0 ? (0).toFixed(places) : text;
}

// A number in a small cell, among others that are at most `limit` in size.
function brief(value, limit) {
  if (value === null || value === undefined) return "–";
  if (limit > 0 && limit < 1e-4) return value === 0 ? "0" : value.toExponential(0);
  return fixed(value, limit >= 1000 ? 0 : limit >= 100 ? 1 : limit >= 0.1 ? 2 : limit >= 0.01 ? 3 : 4);
}

function mix(one, other, share) {
  return "rgb(" + one.map((from, i) => Math.round(from + (other[i] - from) * share)).join(",") + ")";
}

const WHITE = [250, 250, 250], RED = [178, 24, 43], BLUE = [33, 102, 172], GREY = [128, 128, 128];

// Blue below zero, white at zero, red above; full at +-limit.
function diverging(value, limit) {
  if (value === null || value === undefined) return mix(GREY, GREY, 0);
  const share = limit > 0 ? Math.min(1, Math.abs(value) / limit) : 0;
  return mix(WHITE, value < 0 ? BLUE : RED, share);
}

// White to blue, from low to high.
function sequential(value, low, high) {
  if (value === null || value === undefined) return mix(GREY, GREY, 0);
  return mix(WHITE, BLUE, high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0);
}

// Black or white, whichever can be read on a colour of the two scales.
function readable(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map(Number);
  return red * 0.299 + green * 0.587 + blue * 0.114 > 150 ? "#111" : "#fff";
}

// Colours an element; its text becomes black or white, whichever can be read on it.
function paint(target, colour) {
  target.style.background = colour;
  target.style.color = readable(colour);
  return target;
}

const tip = element("div");
tip.id = "tip";
document.body.append(tip);

// Shows what `text` gives for the event while the pointer is over an element.
function explain(target, text) {
  target.addEventListener("mousemove", (event) => {
    const found = text(event);
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.textContent = found;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  });
  target.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}

// The colours of a scale with the numbers at its ends.
function scaleBar(low, high, colour, name) {
  const line = element("p", undefined, "faint"), bar = element("span", undefined, "scale");
  const colours = [0, .25, .5, .75, 1].map((share) => colour(low + share * (high - low)));
  bar.style.background = `linear-gradient(to right, ${colours.join(",")})`;
  line.append(element("span", spelled(low)), bar, element("span", spelled(high) + " " + name));
  return line;
}

// A list to choose from; what is chosen is a number.
function selection(name, entries, chosen, change) {
  const label = element("label", name + " "), select = element("select");
  entries.forEach((entry, i) => {
    const option = element("option", entry);
    option.value = i;
    select.append(option);
  });
  select.value = chosen;
  select.addEventListener("change", () => change(Number(select.value)));
  label.append(select);
  return { label, select };
}

// The option that all panels of the page show, and what follows when another is chosen.
let chosen = data.chosen;
const followers = [];

function choose(option) {
  chosen = option;
  for (const follow of followers) follow(option);
}

// The list from which the reader chooses an option.
function chooser() {
  const { label, select } = selection(data.choice, data.options, chosen, choose);
  followers.push((option) => { select.value = option; });
  return label;
}

// Panels: a list is a column in a row, and a row in a column. `beside` is the number of panels in the row.
const PANELS = {};

function fill(box, panels, across = false, beside = 1) {
  for (const panel of panels) {
    const part = element("section", undefined, Array.isArray(panel) ? (across ? "column" : "row") : "");
    box.append(part);
    if (Array.isArray(panel)) { fill(part, panel, !across, across ? beside : panel.length); continue; }
    if (panel.heading) part.append(element("h2", panel.heading));
    if (panel.note) part.append(element("p", panel.note, "faint"));
    PANELS[panel.kind](part, panel, beside);
  }
}

PANELS.Each = (part, { panels }, beside) => {
  const shown = [];
  if (data.choice) part.append(chooser());
  followers.push((option) => {
    shown.forEach((one) => { one.hidden = true; });
    if (!panels[option]) return;
    if (!shown[option]) {
      shown[option] = element("div");
      part.append(shown[option]);
      fill(shown[option], [panels[option]], false, beside);
    }
    shown[option].hidden = false;
  });
};
