// The next token, before and after, side by side; their KL divergence.
import { element, find, inWords, nats, percent, visible } from "./dom.js";
import { tokenText } from "./runs.js";
import { answers } from "./state.js";

const MOST = 8, BOTH = 6; // lines without and with interventions
const SHOWN = 0.001, LEAST = 3; // the probability from which a token has a line; lines that there are at least
let tools = null;

export function setMeasures(found) { tools = found; }

// The tokens that either run holds likely, with both probabilities; those that moved most are among them.
export function comparedTokens(before, after) {
  const ids = new Set([...before.next.slice(0, after ? 5 : MOST), ...(after ? after.next.slice(0, 5) : [])].map(({ id }) => id));
  const one = tools.probabilities(before.logits), other = after ? tools.probabilities(after.logits) : null;
  const highest = (line) => Math.max(line.before, line.after ?? 0);
  const lines = [...ids].map((id) => ({ id, before: one[id], after: other ? other[id] : null })).sort((a, b) => highest(b) - highest(a));
  return lines.filter((line, i) => i < LEAST || highest(line) >= SHOWN).slice(0, after ? BOTH : MOST);
}

export function divergence() { return answers.after ? tools.kl(answers.before.logits, answers.after.logits) : 0; }

export function drawNext() {
  const box = find("next"), { before, after } = answers;
  if (!before) return;
  const legend = element("div", { class: "legend" });
  if (after) legend.append(swatch("--grey", "before"), swatch("--accent", "after"));
  else legend.append(element("span", {}, "How likely each token is to come next."));
  const list = element("div", { class: "next" + (after ? "" : " alone") });
  const lines = comparedTokens(before, after), moved = after ? movers(lines) : [];
  for (const line of lines) list.append(row(line, after, moved.includes(line)));
  box.replaceChildren(legend, list);
  if (after) {
    box.append(element("p", { class: "kl", title: "KL divergence of the prediction after from the prediction before, in nats" },
      element("span", {}, "Effect: "), element("b", {}, inWords(divergence())), element("span", { class: "faint small" }, "KL ", element("span", { id: "kl" }, nats(divergence())), " nats")),
    element("p", { class: "faint small" }, "How far the interventions move the prediction. Below 0.01 nats it hardly moves, above 1 it is another one."));
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
    bar.style.width = 100 * value + "%";
    bars.append(bar);
    numbers.append(element("span", { class: kind, "aria-label": kind }, percent(value)));
  }
  const text = visible(tokenText(id));
  const sign = most ? element("span", { class: "moved", title: "moved far" }, after > before ? "▲" : "▼") : null;
  return element("div", { class: "line", dataset: { id } }, element("span", { class: "token", title: text }, text, sign), bars, numbers);
}

// One sentence: for screen readers, and at the foot of a phone.
function say() {
  const { before, after } = answers, top = (found) => visible(found.next[0].text).trim() + " " + percent(found.next[0].probability);
  const text = after ? `${top(before)} → ${top(after)}, effect ${inWords(divergence())}` : `next token: ${top(before)}`;
  find("summary").textContent = text;
  find("strip-next").textContent = text;
  find("strip").hidden = !after;
}
