// Makes a steering vector: the mean activation of some texts less that of others, added to the stream.
import { button, clearNotice, element, notice } from "./dom.js";
import { place, steer } from "./entries.js";
import { theEngine } from "./runs.js";
import { addEntry, answers } from "./state.js";

export const title = "Steer";
let more, less, hook, mean, spot, made, wanted = null;

export function build(box) {
  more = texts("more", "The capital of Germany is");
  less = texts("less", "The capital of France is");
  hook = element("select", { id: "steer-hook" });
  mean = element("select", { id: "steer-mean" }, element("option", { value: "mean" }, "mean over the positions of each text"), element("option", { value: "-1" }, "last position of each text"));
  spot = element("select", { id: "steer-spot" });
  made = button("Add this vector", press, { class: "main", id: "steer-add" });
  box.replaceChildren(
    element("p", { class: "faint small" }, "A direction: the mean activation of the first texts less that of the second ones, at one hook point. Adding it to the stream pulls the prediction towards the first. Its strength gets a slider in the list."),
    element("div", { class: "steer" }, field("towards, one text a line", more), field("away from, one text a line", less)),
    element("div", { class: "steer three" }, field("hook point", hook), field("read at", mean), field("added at", spot)), element("div", { class: "bar" }, made));
}

function texts(name, example) { return element("textarea", { id: "steer-" + name, rows: 2, spellcheck: "false", placeholder: example }); }
function field(text, input) { return element("div", { class: "field" }, element("label", { for: input.id }, text), input); }

export function draw() {
  const hooks = Object.entries(theEngine()?.manifest.hooks || {}).filter(([name, { kinds }]) => kinds.includes("add") && !name.includes(".attn."));
  if (!hook.options.length) {
    hook.replaceChildren(...hooks.map(([name]) => element("option", { value: name }, name)));
    const streams = hooks.map(([name]) => name).filter((name) => name.endsWith("hook_resid_post"));
    hook.value = streams[Math.max(0, Math.ceil(streams.length / 2) - 1)] || hooks[0]?.[0] || "";
  }
  const now = wanted ?? (spot.value || "null");
  spot.replaceChildren(element("option", { value: "null" }, "every position"), element("option", { value: "[-1]" }, "the prompt's last position"),
    ...answers.tokens.map((_, i) => element("option", { value: `[${i}]` }, place(i))));
  spot.value = now;
  if (spot.value) wanted = null; // else the prompt that has this position is still to come
  else spot.value = "null";
}

// Fills the form from an entry, so that a lesson's vector can be changed.
export function show(entry) {
  if (!more || entry?.value?.from !== "contrast") return;
  more.value = entry.value.more.join("\n");
  less.value = entry.value.less.join("\n");
  hook.value = entry.hook;
  mean.value = String(entry.value.position ?? -1);
  wanted = JSON.stringify(entry.positions ?? null);
}

function lines(area) { return area.value.split("\n").map((line) => line.trim()).filter(Boolean); }

function press() {
  const empty = [more, less].find((area) => !lines(area).length);
  clearNotice("steer");
  if (empty) {
    notice("A direction needs a text on both sides: one that it leads towards, one that it leads away from.", "steer");
    empty.focus();
    return;
  }
  addEntry(steer(hook.value, lines(more), lines(less), mean.value === "mean" ? "mean" : Number(mean.value), JSON.parse(spot.value)));
}
