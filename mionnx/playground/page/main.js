// The page: opens the engine, then draws what the state says and what the model answers.
import { open } from "./engine/engine.js";
import * as attention from "./attention.js";
import { drawChanges, listenChanges } from "./changes.js";
import { button, bytes, clearNotice, element, find, notice, sentence, visible } from "./dom.js";
import { clearTexts, follow, listenGeneration, showCount } from "./generation.js";
import { continues, doubt, head, isSpecial, readPlace, readsTokens, words } from "./heads.js";
import * as lens from "./lens.js";
import { drawLesson, openLesson, setLessons } from "./lessons.js";
import { readLink, writeLink } from "./link.js";
import { closeMenu } from "./menu.js";
import * as next from "./next.js";
import * as parts from "./parts.js";
import { refresh, setEngine, theEngine, tokenText } from "./runs.js";
import { drawExport, listenShare } from "./share.js";
import { asPrompt, drawTyped, listenStarts, showStarts } from "./starts.js";
import { answers, change, forgetPast, isTyping, onAnswer, onChange, state, waiting, whenTyped } from "./state.js";
import * as steering from "./steering.js";
import * as stream from "./stream.js";
import { listenTheme } from "./theme.js";

const VIEWS = { lens, stream, attention, parts, steer: steering };
let built = null, written = "", ready = false;

// A recurrent model has no patterns; a head of whole texts reads no cell alone, so that there is no lens.
function views() {
  const absent = [theEngine()?.manifest.patterns.length === 0 ? "attention" : "", readsTokens() ? "stream" : "lens"];
  return Object.entries(VIEWS).filter(([name]) => !absent.includes(name));
}

function drawTabs() {
  if (!views().some(([name]) => name === state.view)) [[state.view]] = views();
  find("tabs").replaceChildren(...views().map(([name, view]) => element("button", {
    type: "button", role: "tab", id: "tab-" + name, "aria-selected": String(state.view === name), "aria-controls": "view", tabindex: state.view === name ? 0 : -1,
    onclick: () => change({ view: name }),
  }, view.title)));
}

function tabKeys(event) {
  const names = views().map(([name]) => name), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  change({ view: names[(names.indexOf(state.view) + step + names.length) % names.length] });
  find("tab-" + state.view).focus();
}

function drawView() {
  const view = VIEWS[state.view];
  if (built !== state.view) {
    built = state.view;
    view.build(find("view"));
    find("view").setAttribute("aria-labelledby", "tab-" + state.view);
    if (state.view === "steer") state.entries.forEach(steering.show);
  }
  const both = Boolean(answers.after) && ["lens", "attention"].includes(state.view);
  find("side").hidden = !both;
  for (const made of find("side").children) made.setAttribute("aria-pressed", String(made.dataset.side === state.side));
  view.draw();
}

function drawTokens() {
  const { end_tokens: ends, unknown: word } = theEngine().manifest.model, unknown = [], chosen = readsTokens() && head() !== "next_token";
  find("tokens").replaceChildren(...answers.tokens.map((id, i) => {
    const text = tokenText(id), lost = word !== null && text.trim() === word;
    if (lost) unknown.push(i);
    const title = `position ${i}, token ${id}` + (ends.includes(id) ? ", end of text" : ""), shown = [element("sup", {}, String(i)), visible(text).trim()];
    if (!chosen || (isSpecial(id) && head() === "token_classes")) return element("span", { class: lost ? "unknown" : "", title }, ...shown);
    return element("button", { type: "button", class: lost ? "unknown" : "", title: title + ": read the model here", "aria-pressed": String(i === readPlace()), dataset: { place: i }, onclick: () => change({ place: i }) }, ...shown);
  }));
  if (unknown.length) notice(`The model does not know the word at position ${unknown.join(", ")}: it reads ${word} there.`, "unknown");
  else clearNotice("unknown");
  if (doubt()) notice(doubt(), "mask");
  else clearNotice("mask");
  find("continue").disabled = !answers.tokens.length;
}

onChange((part) => {
  if ("prompt" in part || "compare" in part) drawTyped();
  if ("prompt" in part && !("place" in part)) state.place = null;
  if ("place" in part && theEngine() && answers.tokens.length) drawTokens();
  if ("prompt" in part || "entries" in part) clearTexts();
  if ("entries" in part || "prompt" in part) { drawChanges(); if (theEngine()) drawExport(); }
  if ("count" in part) showCount();
  if ("lesson" in part || "prompt" in part || "second" in part) drawLesson();
  if ("view" in part) { closeMenu(false); drawTabs(); }
  if ("view" in part || "layer" in part || "head" in part || "side" in part) drawView();
  if ("entries" in part && state.view === "steer" && "lesson" in part) state.entries.forEach(steering.show);
  if (part.prompt !== undefined || part.entries || part.view || part.second !== undefined || part.allLayers !== undefined || part.mapped !== undefined || part.place !== undefined || part.compare !== undefined) {
    waiting();
    refresh();
  }
  remember();
});

onAnswer((kind) => {
  if (kind === "tokens") { drawTokens(); drawChanges(); }
  if (kind === "next") { next.drawNext(); drawChanges(); drawExport(); drawView(); }
  if (kind === "inside") drawView();
  document.body.dataset.state = kind === "idle" && !isTyping() ? "idle" : "busy";
  if (kind === "idle") follow();
});

// The address follows what the reader makes.
let pause;
function remember() {
  if (!ready) return;
  clearTimeout(pause);
  pause = setTimeout(async () => {
    written = "#" + await writeLink(state, theEngine().manifest.model.name);
    history.replaceState(null, "", written);
  }, 120);
}

async function readAddress(hash) {
  if (hash.length < 2 || hash === written) return false;
  try {
    change({ ...(await readLink(hash.slice(1), theEngine().manifest)), lesson: null, side: "after", picked: true });
    clearNotice("link");
    return true;
  } catch (error) {
    notice(sentence(error), "link");
    return false;
  }
}

function progress({ stage, loaded, total, cached }) {
  const share = total ? Math.min(1, loaded / total) : 0;
  find("progress").setAttribute("aria-valuenow", Math.round(100 * share));
  find("progress").firstChild.style.width = 100 * share + "%";
  const said = { tokenizer: "the tokenizer", runtime: "ONNX Runtime", model: "the model", starting: "starting", ready: "ready" }[stage] || "";
  find("loading-size").textContent = stage === "starting" ? "Starting the model …" : `${bytes(loaded)} of ${bytes(total)}, ${said}` + (cached ? " (kept by this browser)" : "");
}

function introduce({ manifest, backend }) {
  const { model } = manifest, weights = model.bits.length ? `${model.bits.join("- and ")}-bit weights` : model.weights;
  find("title").textContent = document.title = manifest.title;
  find("facts").textContent = `${model.layers} layers, ${model.heads} heads, ${bytes(manifest.download)}, ${weights}; runs on this device`;
  const threads = backend.threads === 1 ? "1 thread" : backend.threads + " threads";
  find("next-title").textContent = words().card;
  find("prompt-title").firstChild.textContent = words().text;
  find("writing").hidden = !continues();
  find("compare-box").hidden = head() !== "embedding";
  find("backend").textContent = backend.name === "webgpu" ? "It runs by WebGPU." : `It runs by WebAssembly, ${threads}.` + (backend.note ? " " + backend.note : "");
}

async function start() {
  find("page").classList.add("waiting");
  find("page").inert = true; // by keyboard too
  try {
    const engine = await open("./", { onProgress: progress });
    setEngine(engine);
    introduce(engine);
    drawTabs();
    setLessons(engine.examples);
    find("loading").hidden = true;
    find("page").classList.remove("waiting");
    find("page").inert = false;
    window.playground = { engine, state, answers }; // for the console
    await begin(engine);
  } catch (error) {
    find("loading-title").textContent = "The model did not open";
    find("loading-text").textContent = sentence(error);
    find("loading-text").className = "problem";
    find("progress").hidden = true;
    find("loading-size").replaceChildren(button("Try again", () => location.reload()));
  }
}

async function begin({ examples, manifest }) {
  const first = await showStarts(examples.length);
  ready = true;
  if (await readAddress(location.hash)) return forgetPast();
  if (examples.length && !manifest.spec.length) {
    openLesson(0);
    return forgetPast();
  }
  change({ ...(examples.length ? { prompt: examples[0].prompt } : first), entries: manifest.spec.map((entry) => ({ on: true, ...entry })), lesson: null });
  return forgetPast();
}

find("prompt").addEventListener("input", () => whenTyped("prompt", 200, () => change({ prompt: asPrompt(find("prompt").value) })));
find("compare").addEventListener("input", () => whenTyped("compare", 300, () => change({ compare: find("compare").value })));
find("tabs").addEventListener("keydown", tabKeys);
for (const made of find("side").children) made.addEventListener("click", () => change({ side: made.dataset.side }));
// The event's own address: by now `remember` may have written another over it.
addEventListener("hashchange", (event) => { if (theEngine()) readAddress(new URL(event.newURL).hash); });
listenTheme(() => { if (theEngine()) drawView(); });
listenChanges();
listenGeneration();
listenShare();
listenStarts();
drawTabs();
start();
