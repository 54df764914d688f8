// A table of cells for pointer and keyboard (ARIA's grid): one cell is in the tab order, arrow keys move, Enter or a click picks.
import { element } from "./dom.js";

const DEEP = 0.806, BRIGHT = 0.681; // shares at which white text gives way to black or black to white, in light and in dark
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// Fills `table`.
//   label: says what the grid is; corner: text above the row labels; kind: class of the labels ("token")
//   rows, columns: labels; cell(r, c): null, or { text, share: 0 to 1, name: what a screen reader says, mark: classes, child: element }
//   pick(r, c, cell): Enter or click; tell(r, c): text of the tip under pointer or focus; here: [r, c], the first cell in the tab order
export function fillGrid(table, { label, corner = "", kind = "", rows, columns, cell, pick, tell, here }) {
  const had = table.contains(document.activeElement) ? document.activeElement.dataset : null;
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", label);
  const head = element("tr", { role: "row" }, element("th", { class: "corner" }, corner));
  head.append(...columns.map((name) => element("th", { role: "columnheader", class: kind, title: name }, element("span", {}, name))));
  const lines = rows.map((name, r) => {
    const line = element("tr", { role: "row" }, element("th", { role: "rowheader", class: "side " + kind, title: name }, name));
    line.append(...columns.map((_, c) => makeCell(cell(r, c), r, c)));
    return line;
  });
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...lines));
  Object.assign(table, { pick, tell });
  table.classList.toggle("deepmodel", rows.length > 16 && !table.matches(".small, .large"));
  if (!table.listening) listen(table);
  const start = had ? [had.row, had.column] : here || table.last || [0, 0];
  enter(table, find(table, ...start) || table.querySelector("td[tabindex]"), Boolean(had));
}

function makeCell(said, row, column) {
  if (!said) return element("td", { class: "none", "aria-hidden": "true" });
  const made = element("td", { role: "gridcell", tabindex: -1, class: said.mark, "aria-label": said.name, share: said.share, dataset: { row, column } }, said.child || said.text);
  made.classList.toggle("deep", said.share > DEEP);
  made.classList.toggle("bright", said.share > BRIGHT);
  return made;
}

function find(table, row, column) { return table.querySelector(`td[data-row="${row}"][data-column="${column}"]`); }

function enter(table, cell, focus) {
  if (!cell) return;
  for (const old of table.querySelectorAll('td[tabindex="0"]')) old.tabIndex = -1;
  cell.tabIndex = 0;
  table.last = [cell.dataset.row, cell.dataset.column];
  if (focus) cell.focus({ preventScroll: false });
}

export function focusCell(table, row, column) { enter(table, find(table, row, column), true); }

function listen(table) {
  table.listening = true;
  table.addEventListener("click", ({ target }) => {
    const cell = target.closest("td[role]");
    if (!cell) return;
    enter(table, cell, true);
    hideTip();
    table.pick?.(Number(cell.dataset.row), Number(cell.dataset.column), cell);
  });
  table.addEventListener("keydown", (event) => keyed(table, event));
  for (const kind of ["mouseover", "focusin"]) {
    table.addEventListener(kind, ({ target }) => {
      const cell = target.closest("td[role]");
      if (cell && table.tell) showTip(cell, table.tell(Number(cell.dataset.row), Number(cell.dataset.column)));
    });
  }
  table.addEventListener("mouseleave", hideTip);
  table.addEventListener("focusout", hideTip);
}

function keyed(table, event) {
  const cell = event.target.closest("td[role]");
  if (!cell) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    hideTip();
    table.pick?.(Number(cell.dataset.row), Number(cell.dataset.column), cell);
    return;
  }
  const all = [...cell.parentElement.querySelectorAll("td[role]")];
  const step = STEPS[event.key];
  const next = step ? find(table, Number(cell.dataset.row) + step[0], Number(cell.dataset.column) + step[1])
    : event.key === "Home" ? all[0] : event.key === "End" ? all[all.length - 1] : null;
  if (!next) return;
  event.preventDefault();
  enter(table, next, true);
}

const tip = element("div", { id: "tip", role: "tooltip" });
document.body.append(tip);

// Shows a text near an element; nothing where a menu is open.
export function showTip(target, text) {
  if (!text || document.querySelector(".menu")) return hideTip();
  tip.textContent = text;
  tip.style.display = "block";
  const box = target.getBoundingClientRect(), below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(6, Math.min(box.left, innerWidth - tip.offsetWidth - 6)) + "px";
  tip.style.top = (below ? box.bottom + 6 : Math.max(6, box.top - tip.offsetHeight - 6)) + "px";
  return undefined;
}

export function hideTip() { tip.style.display = "none"; }
addEventListener("scroll", hideTip, true);
