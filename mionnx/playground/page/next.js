// What the model says, before and after, side by side; how far the interventions move it.
import { element, find, visible } from "./dom.js";
import { barLength, briefly, choiceText, comparedChoices, effect, effectParts, head, inWords, measureNote, readWhere, valueText, words } from "./heads.js";
import { answers } from "./state.js";

export function divergence() { return answers.after ? effect(answers.before.logits, answers.after.logits) : 0; }

export function drawNext() {
  const box = find("next"), { before, after } = answers;
  if (!before) return;
  const legend = element("div", { class: "legend" });
  if (after) legend.append(swatch("--grey", "before"), swatch("--accent", "after"));
  else legend.append(element("span", {}, words().about));
  const list = element("div", { class: "next" + (after ? "" : " alone") });
  const lines = comparedChoices(before, after), moved = after ? movers(lines) : [];
  for (const line of lines) list.append(row(line, after, moved.includes(line)));
  const where = element("p", { class: "faint small" }, readWhere());
  box.replaceChildren(...(where.textContent ? [where] : []), legend, list);
  if (!lines.length) list.replaceWith(element("p", { class: "faint small" }, "Write texts to compare with, one a line, under the text."));
  if (after) {
    const [said, figure, unit] = effectParts(divergence());
    box.append(element("p", { class: "kl", title: measureNote() },
      element("span", {}, "Effect: "), element("b", {}, inWords(divergence())), element("span", { class: "faint small" }, said + " ", element("span", { id: "kl" }, figure), unit && " " + unit)),
    element("p", { class: "faint small" }, measureNote()));
  }
  say();
}

function swatch(colour, name) {
  const dot = element("i");
  dot.style.background = `var(${colour})`;
  return element("span", {}, dot, name);
}

// The lines that moved at least half as far as the one that moved most, and by a hundredth.
function movers(lines) {
  const moved = ({ before, after }) => Math.abs(after - before), most = Math.max(...lines.map(moved));
  return lines.filter((line) => moved(line) >= Math.max(0.01, most / 2));
}

function row({ id, before, after }, both, most) {
  const bars = element("div", { class: "bars", "aria-hidden": "true" }), numbers = element("div", { class: "numbers" });
  for (const [kind, value] of both ? [["before", before], ["after", after]] : [["before", before]]) {
    const bar = element("i", { class: kind });
    bar.style.width = 100 * barLength(value) + "%";
    bars.append(bar);
    numbers.append(element("span", { class: kind, "aria-label": kind }, valueText(value)));
  }
  const text = choiceText(id);
  const sign = most ? element("span", { class: "moved", title: "moved far" }, after > before ? "▲" : "▼") : null;
  const kind = head() === "embedding" ? "line text" : "line";
  return element("div", { class: kind, dataset: { id } }, element("span", { class: "token", title: text }, text, sign), bars, numbers);
}

// One sentence: for screen readers, and at the foot of a phone.
function say() {
  const { before, after } = answers, top = (found) => (head() === "embedding" ? briefly(found).text : visible(found.next[0].text).trim() + " " + valueText(found.next[0].probability));
  const text = after ? `${top(before)} → ${top(after)}, effect ${inWords(divergence())}` : `${words().summary}: ${top(before)}`;
  find("summary").textContent = text;
  find("strip-next").textContent = text;
  find("strip").hidden = !after;
}
