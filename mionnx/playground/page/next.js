// The next token, before and after, side by side; their KL divergence.
import { element, find, nats, percent, visible } from "./dom.js";
import { tokenText } from "./runs.js";
import { answers } from "./state.js";

const MOST = 8, BOTH = 6; // lines without and with interventions
let tools = null;

export function setMeasures(found) { tools = found; }

// The tokens that either run holds likely, with both probabilities.
export function comparedTokens(before, after) {
  const ids = new Set([...before.next.slice(0, after ? 5 : MOST), ...(after ? after.next.slice(0, 5) : [])].map(({ id }) => id));
  const one = tools.probabilities(before.logits), other = after ? tools.probabilities(after.logits) : null;
  return [...ids].map((id) => ({ id, before: one[id], after: other ? other[id] : null }))
    .sort((a, b) => Math.max(b.before, b.after ?? 0) - Math.max(a.before, a.after ?? 0)).slice(0, after ? BOTH : MOST);
}

export function divergence() { return answers.after ? tools.kl(answers.before.logits, answers.after.logits) : 0; }

export function drawNext() {
  const box = find("next"), { before, after } = answers;
  if (!before) return;
  const legend = element("div", { class: "legend" });
  if (after) legend.append(swatch("--grey", "before"), swatch("--accent", "after"));
  else legend.append(element("span", {}, "How likely each token is to come next."));
  const list = element("div", { class: "next" + (after ? "" : " alone") });
  for (const line of comparedTokens(before, after)) list.append(row(line, after));
  box.replaceChildren(legend, list);
  if (after) {
    box.append(element("p", { class: "kl", title: "KL divergence of the prediction after from the prediction before, in nats" },
      element("b", { id: "kl" }, nats(divergence())), element("span", {}, "nats KL divergence")),
    element("p", { class: "faint small" }, "How far the interventions move the prediction; 0 is not at all."));
  }
  say();
}

function swatch(colour, name) {
  const dot = element("i");
  dot.style.background = `var(${colour})`;
  return element("span", {}, dot, name);
}

function row({ id, before, after }, both) {
  const bars = element("div", { class: "bars", "aria-hidden": "true" }), numbers = element("div", { class: "numbers" });
  for (const [kind, value] of both ? [["before", before], ["after", after]] : [["before", before]]) {
    const bar = element("i", { class: kind });
    bar.style.width = 100 * value + "%";
    bars.append(bar);
    numbers.append(element("span", { class: kind, "aria-label": kind }, percent(value)));
  }
  const text = visible(tokenText(id));
  return element("div", { class: "line", dataset: { id } }, element("span", { class: "token", title: text }, text), bars, numbers);
}

// One sentence: for screen readers, and at the foot of a phone.
function say() {
  const { before, after } = answers, top = (found) => visible(found.next[0].text).trim() + " " + percent(found.next[0].probability);
  const text = after ? `${top(before)} → ${top(after)}, KL ${nats(divergence())} nats` : `next token: ${top(before)}`;
  find("summary").textContent = text;
  find("strip").textContent = text;
  find("strip").hidden = !after;
}
