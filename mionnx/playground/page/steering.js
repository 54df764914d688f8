// Makes a steering vector: the mean activation of some texts less that of others, added to the stream.
import { place, pointInWords, steer } from "./entries.js";
import { fillGrid } from "./grid.js";
import { button, clearNotice, element, notice } from "./dom.js";
import { briefly, effect, effectShare, effectText, inWords, readsBoth } from "./heads.js";
import { theEngine, tried } from "./runs.js";
import { addEntry, answers, replaceEntry, state } from "./state.js";

export const title = "Steer";
const DOSES = [1, 2, 4, 8], MOST_LAYERS = 8;
let more, less, hook, mean, spot, made, trial, doses, note, wanted = null, doing = 0;

export function build(box) {
  more = texts("more", "The capital of Germany is");
  less = texts("less", "The capital of France is");
  hook = element("select", { id: "steer-hook" });
  mean = element("select", { id: "steer-mean" }, element("option", { value: "mean" }, "mean of each text"), readsBoth() ? element("option", { value: "0" }, "first token of each text") : element("option", { value: "-1" }, "last token of each text"));
  spot = element("select", { id: "steer-spot" });
  made = button("Add this vector", press, { class: "main", id: "steer-add" });
  trial = button("Try layers and strengths", tryAll, { id: "steer-try" });
  doses = element("table", { class: "grid lens doses", hidden: true });
  note = element("p", { class: "faint small", role: "status" });
  box.replaceChildren(
    element("p", { class: "faint small" }, "A direction: the mean activation of the first texts less that of the second ones, at one hook point. Adding it to the stream pulls the prediction towards the first."),
    element("div", { class: "steer" }, field("towards, one text a line", more), field("away from, one text a line", less)),
    element("div", { class: "steer three" }, field("added to", hook), field("read at", mean), field("at", spot)), element("div", { class: "bar" }, made, trial), note, element("div", { class: "scroll" }, doses));
}

function texts(name, example) { return element("textarea", { id: "steer-" + name, rows: 2, spellcheck: "false", placeholder: example }); }
function field(text, input) { return element("div", { class: "field" }, element("label", { for: input.id }, text), input); }

export function draw() {
  const hooks = Object.entries(theEngine()?.manifest.hooks || {}).filter(([name, { kinds }]) => kinds.includes("add") && !name.includes(".attn."));
  if (!hook.options.length) {
    const streams = streamsOf(hooks), option = (name) => element("option", { value: name, title: name }, pointInWords(name));
    hook.replaceChildren(element("optgroup", { label: "after a layer" }, ...streams.map(option)),
      element("optgroup", { label: "elsewhere" }, ...hooks.map(([name]) => name).filter((name) => !streams.includes(name)).map(option)));
    hook.value = streams[Math.max(0, Math.ceil(streams.length / 2) - 1)] || hooks[0]?.[0] || "";
  }
  const now = wanted ?? (spot.value || "null");
  const last = readsBoth() ? [] : [element("option", { value: "[-1]" }, "the prompt's last position")];
  spot.replaceChildren(element("option", { value: "null" }, "every position"), ...last,
    ...answers.tokens.map((_, i) => element("option", { value: `[${i}]` }, place(i))));
  spot.value = now;
  if (spot.value) wanted = null; // else the prompt that has this position is still to come
  else spot.value = "null";
}

function streamsOf(hooks) { return hooks.map(([name]) => name).filter((name) => name.endsWith("hook_resid_post")); }

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

// The vector that the form describes, at a hook point; null where a side has no text.
function asked(at) {
  const empty = [more, less].find((area) => !lines(area).length);
  clearNotice("steer");
  if (!empty) return steer(at, lines(more), lines(less), mean.value === "mean" ? "mean" : Number(mean.value), JSON.parse(spot.value));
  notice("A direction needs a text on both sides: one that it leads towards, one that it leads away from.", "steer");
  empty.focus();
  return null;
}

function press() {
  const entry = asked(hook.value);
  if (entry) addEntry(entry);
}

// The entry of the list that steers by the same texts, which a trial takes the place of.
function alike(entry) {
  const texts = ({ value }) => JSON.stringify([value?.from, value?.more, value?.less]);
  return state.entries.find((one) => one.kind === "add" && texts(one) === texts(entry));
}

// Every layer, or some of them, with each strength: what the model would say next, a cell as deep as the effect.
export async function tryAll() {
  const streams = streamsOf(Object.entries(theEngine().manifest.hooks)), step = Math.ceil(streams.length / MOST_LAYERS);
  const rows = streams.filter((_, i) => (streams.length - 1 - i) % step === 0).reverse(), found = rows.map(() => []);
  if (!asked(hook.value)) return;
  const tokens = answers.tokens, mine = ++doing, instead = alike(asked(hook.value));
  const current = () => mine === doing && tokens === answers.tokens && trial.isConnected;
  doses.hidden = false;
  for (const [r, name] of rows.entries()) {
    for (const [c, strength] of DOSES.entries()) {
      note.textContent = "Trying …";
      try {
        const result = await tried({ ...asked(name), strength }, instead);
        if (!current()) return;
        found[r][c] = result && { ...briefly(result), effect: effect(answers.before.logits, result.logits) };
      } catch (error) {
        note.textContent = error.message;
        return;
      }
    }
    drawDoses(rows, found, instead);
  }
  note.textContent = "What the model then says, by layer and strength; the deeper the colour, the stronger the effect. Press a cell to use it.";
}

function drawDoses(rows, found, instead) {
  fillGrid(doses, {
    label: "Prediction by layer and strength", corner: "", rows: rows.map((name) => pointInWords(name).replace("the stream ", "")), columns: DOSES.map((dose) => "× " + dose),
    cell: (r, c) => {
      const one = found[r][c];
      return one && { text: one.text, share: effectShare(one.effect), name: `${pointInWords(rows[r])}, strength ${DOSES[c]}: ${one.text}, effect ${inWords(one.effect)}` };
    },
    tell: (r, c) => { const one = found[r][c]; return one && `${one.line}\neffect ${inWords(one.effect)}, ${effectText(one.effect)}`; },
    pick: (r, c) => {
      const entry = { ...asked(rows[r]), strength: DOSES[c] }, at = state.entries.indexOf(instead ?? alike(entry));
      hook.value = rows[r];
      if (at >= 0) replaceEntry(at, entry);
      else addEntry(entry);
    },
  });
}
