// Elements, and numbers and tokens as people read them. Text becomes text here, never markup.

// An element: element("td", { class: "token", "aria-label": "…", onclick: f, dataset: {…} }, child or text, ...).
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name === "share") made.style.setProperty("--share", value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, press, attributes = {}) {
  return element("button", { type: "button", onclick: press, ...attributes }, text);
}

export function find(id) { return document.getElementById(id); }

// White space made visible, so that every token can be seen.
export function visible(token) {
  const shown = String(token).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown.trim() ? shown : "␣".repeat(Math.max(1, shown.length));
}

export function quoted(token) { return "“" + visible(token).trim() + "”"; }

// A probability as a percentage.
export function percent(value) {
  const part = 100 * value;
  if (part >= 99.95) return "100\u00a0%";
  if (part >= 10) return part.toFixed(1) + "\u00a0%";
  if (part >= 0.1) return part.toFixed(2) + "\u00a0%";
  return part > 0 ? "<\u00a00.1\u00a0%" : "0\u00a0%";
}

// An effect in figures, without its unit.
export function nats(value) {
  if (!Number.isFinite(value)) return "∞";
  const size = Math.max(0, value);
  return size < 1e-4 ? "< 0.0001" : size < 0.01 ? size.toFixed(4) : size < 10 ? size.toFixed(3) : size.toFixed(1);
}

export function bytes(count) {
  return count >= 1e6 ? (count / 1e6).toFixed(1) + " MB" : Math.round(count / 1e3) + " kB";
}

// A sentence at the top of the page; it stays until it is closed or `key` is said again or cleared.
export function notice(text, key = text) {
  clearNotice(key);
  const box = element("div", { class: "problem", dataset: { key } }, element("span", {}, text));
  box.append(button("Close", () => box.remove(), { class: "quiet" }));
  find("notices").append(box);
}

export function clearNotice(key) {
  for (const box of [...find("notices").children]) if (box.dataset.key === key) box.remove();
}

export function sentence(error) {
  return error && error.message ? String(error.message) : "Something went wrong: " + error;
}

export async function copy(text, pressed, said = "Copied") {
  const name = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = said;
  } catch {
    pressed.textContent = "Select and copy it yourself";
  }
  setTimeout(() => { pressed.textContent = name; }, 1600);
}
