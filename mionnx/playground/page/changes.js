// The list of interventions: switch, strength, place, removal; why one cannot apply.
import { button, element, find, visible } from "./dom.js";
import { describe, place, pointInWords } from "./entries.js";
import { continues, inWords, readsBoth, readsTokens } from "./heads.js";
import { divergence } from "./next.js";
import { tokenText } from "./runs.js";
import { show, tryAll } from "./steering.js";
import { answers, canUndo, change, removeEntries, replaceEntry, state, undo } from "./state.js";

let dragging = false; // a slider that is held must not be drawn anew

export function drawChanges() {
  if (dragging) return;
  const box = find("changes"), focus = document.activeElement?.dataset?.key;
  find("clear").hidden = find("export").hidden = !state.entries.length;
  find("undo").hidden = !canUndo();
  if (!state.entries.length) {
    box.replaceChildren(element("p", { class: "faint small" }, `None yet. Point at a cell of the ${readsTokens() ? "lens" : "stream"}, an edge of a pattern or a part of the model in the views, and choose what to do to it.`));
    return;
  }
  box.replaceChildren(...state.entries.map(line));
  if (focus) box.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

// Whether what is switched on leaves the prediction nearly where it was.
function weak() { return Boolean(answers.after) && inWords(divergence()) === "almost none"; }

function line(entry, index) {
  const off = entry.on === false, id = "entry" + index, problem = answers.problems[index];
  const check = element("input", { type: "checkbox", id, checked: !off, dataset: { key: "on" + index }, onchange: () => replaceEntry(index, { on: off }) });
  const steers = entry.kind === "add" && entry.value?.from === "contrast" && !entry.label;
  const what = element("label", { class: "what", for: id, title: describe(entry) }, steers ? `Steer towards “${entry.value.more.join(" / ")}”` : entry.label || describe(entry));
  const gone = button("×", () => removeEntries((_, i) => i === index), { class: "quiet gone", title: "Remove", "aria-label": "Remove: " + describe(entry), dataset: { key: "gone" + index } });
  const more = element("div", { class: "more" });
  if (entry.kind === "add") more.append(...dose(entry, index, "strength", entry.strength ?? 1, [-8, 8]));
  if (entry.kind === "scale" && typeof entry.value === "number") more.append(...dose(entry, index, "value", entry.value, [-2, 4]));
  if (["add", "scale", "zero"].includes(entry.kind)) more.append(places(entry, index));
  if (steers) more.append(element("span", { class: "faint small" }, pointInWords(entry.hook) + (entry.value.less.length ? `, away from “${entry.value.less.join(" / ")}”` : "")));
  more.append(element("code", {}, entry.hook));
  if (steers && !off && !problem && weak()) {
    more.append(element("p", { class: "small" }, "Almost no effect: try another layer, or more strength. "), button("Try layers and strengths", () => { change({ view: "steer" }); show(entry); tryAll(); }));
  }
  if (problem) more.append(element("p", { class: "wrong" }, "Left out: " + problem));
  return element("div", { class: "entry" + (off || problem ? " off" : "") }, element("span", { class: "check" }, check), what, gone, more);
}

function dose(entry, index, field, value, [low, high]) {
  const name = field === "value" ? "factor" : "strength", set = (text) => {
    const number = Number(text);
    if (text !== "" && Number.isFinite(number)) replaceEntry(index, { [field]: number });
  };
  const slide = element("input", { type: "range", min: Math.min(low, value), max: Math.max(high, value), step: 0.1, "aria-label": `${name}: ${describe(entry)}`, dataset: { key: "slide" + index } });
  const type = element("input", { type: "number", step: 0.1, "aria-label": `${name} as a number`, dataset: { key: "dose" + index } });
  slide.value = type.value = value;
  slide.addEventListener("input", () => { dragging = true; type.value = slide.value; set(slide.value); });
  slide.addEventListener("change", () => { dragging = false; drawChanges(); });
  type.addEventListener("change", () => set(type.value));
  return [element("div", { class: "dose" }, slide, type)];
}

// Where along the text it applies.
function places(entry, index) {
  const options = [["null", "at every position"]];
  if (!readsBoth()) options.push(["[-1]", "at the prompt's last position"]);
  if (continues()) options.push(['"prompt"', "in the prompt only"], ['"generated"', "in generated tokens only"]);
  answers.tokens.forEach((id, i) => options.push([`[${i}]`, `at ${i} ${visible(tokenText(id)).trim()}`]));
  const now = JSON.stringify(entry.positions ?? null);
  if (!options.some(([value]) => value === now)) options.push([now, "at " + (entry.positions || []).map((at) => place(at)).join(", ")]);
  const choice = element("select", { "aria-label": "Positions of: " + describe(entry), dataset: { key: "where" + index } }, ...options.map(([value, text]) => element("option", { value }, text)));
  choice.value = now;
  choice.addEventListener("change", () => replaceEntry(index, { positions: JSON.parse(choice.value) }));
  return choice;
}

export function listenChanges() {
  find("clear").addEventListener("click", () => change({ entries: [] }));
  find("undo").addEventListener("click", undo);
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("textarea, input[type=number]"); // which has an undo of its own
    if (typing || event.key !== "z" || event.shiftKey || event.altKey || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    undo();
  });
}
