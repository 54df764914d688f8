// Interventions tried one by one, each with its effect: a button that begins and stops it, and a note of how far it has come.
import { button, element } from "./dom.js";
import { effect } from "./heads.js";
import { measure } from "./runs.js";
import { answers } from "./state.js";

const AT_ONCE = 1500, REDRAWN = 250; // milliseconds of measuring that nobody asked for; between drawings

export class Measuring {
  // name: of the button; unit: what is counted; draw: called as effects come; list(): the interventions in their order, those that
  // come first are measured at once as far as time allows, in steps of `row()`; key(): what the effects belong to, beside the prompt
  constructor({ id, name, unit, draw, list, row, key = () => "" }) {
    Object.assign(this, { name, unit, draw, list, row, key, found: null, running: false, offered: null });
    this.press = button(name(), () => (this.running ? this.stop() : this.start()), { id });
    this.note = element("span", { class: "faint small", role: "status" });
  }

  // The effects that belong to what is shown; null without any.
  get known() { return this.found && this.found.tokens === answers.tokens && this.found.key === this.key() ? this.found : null; }

  // The first rows at once, when the prompt is another one.
  offer() {
    if (!this.running) this.press.textContent = this.name();
    const shown = answers.before && [answers.before, this.key()];
    if (this.known || this.running || !shown || shown.every((part, i) => part === this.offered?.[i])) return;
    this.offered = shown;
    this.start(this.row() * Math.max(1, Math.floor(AT_ONCE / (answers.before.ms * this.row()))));
  }

  stop() { this.running = false; }

  // count: how many are measured, the first ones; all of them when the reader asks.
  async start(count = Infinity) {
    const all = this.list(), list = all.slice(0, count), asked = count === Infinity;
    this.running = asked;
    let drawn = performance.now();
    if (asked) this.press.textContent = "Stop";
    const mine = this.found = { tokens: answers.tokens, key: this.key(), values: [], over: Boolean(answers.after), left: all.length - list.length };
    try {
      await measure(list, effect, (index, value) => {
        mine.values[index] = value;
        this.note.textContent = `${index + 1} of ${list.length} ${this.unit}`;
        if (performance.now() - drawn < REDRAWN || !this.press.isConnected) return;
        drawn = performance.now();
        this.draw();
      }, () => (asked && !this.running) || mine !== this.found);
    } catch (error) {
      this.note.textContent = error.message;
    }
    if (mine !== this.found) return;
    mine.done = true;
    this.running = false;
    this.press.textContent = this.name();
    if (this.press.isConnected) this.draw();
  }
}

// The largest of the effects, for the depth of cells.
export function largestOf(known) { return known ? Math.max(1e-9, ...known.values.filter((value) => value !== undefined)) : 1; }

export function brief(value) { return value < 0.0005 ? "0" : value < 10 ? value.toFixed(value < 1 ? 3 : 2) : value.toFixed(1); }
