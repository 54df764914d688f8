// Prepared examples: a prompt, what is done to it, and the text that explains it.
import { button, element, find } from "./dom.js";
import { checkedEntry } from "./link.js";
import { theEngine } from "./runs.js";
import { change, state } from "./state.js";

let lessons = [];

export function setLessons(found) {
  lessons = found;
  find("lessons").hidden = !lessons.length;
  find("lesson-list").replaceChildren(...lessons.map(({ name }, i) => button(`${i + 1}. ${name}`, () => openLesson(i), { "aria-pressed": "false" })));
}

export function openLesson(number) {
  const { prompt, second, compare, interventions = [], view, layer, head, generate } = lessons[number], { manifest } = theEngine();
  const entries = interventions.map((entry, i) => checkedEntry(entry, manifest, `Intervention ${i + 1} of this example`));
  const picked = layer !== undefined && layer !== null;
  change({ picked, mapped: false, prompt, second: second || "", compare: compare ? compare.join("\n") : state.compare, place: null, entries, view: view || state.view, layer: layer ?? 0, head: head ?? 0, side: "after", lesson: number, count: generate || state.count });
}

export function drawLesson() {
  const box = find("lesson"), { lesson } = state;
  [...find("lesson-list").children].forEach((made, i) => made.setAttribute("aria-pressed", String(i === lesson)));
  box.hidden = lesson === null || !lessons[lesson];
  if (box.hidden) return;
  const { prompt, second = "" } = lessons[lesson], left = state.prompt !== prompt || state.second !== (second || "");
  box.classList.toggle("left-behind", left);
  find("lesson-list").classList.toggle("left-behind", left);
  const away = left ? element("p", { class: "away" }, `You have left this example: its text is about “${prompt}”.`) : null;
  const text = element("div", { "aria-live": "polite" }, ...[away].filter(Boolean), ...(lessons[lesson].text || "").split(/\n\s*\n/).map((part) => element("p", {}, part)));
  const steps = element("div", { class: "steps" }, button("Again", () => openLesson(lesson), { title: "Back to how this example begins", class: left ? "main" : "" }));
  if (lesson + 1 < lessons.length) steps.append(button("Next", () => { openLesson(lesson + 1); find("lessons").scrollIntoView({ block: "nearest" }); }, { class: left ? "" : "main" }));
  box.replaceChildren(text, steps);
}
