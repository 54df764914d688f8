// The list as a spec file for Python, with the lines that use it; the address as a link.
import { button, copy, element, find, notice, sentence } from "./dom.js";
import { writeLink } from "./link.js";
import { continues, head } from "./heads.js";
import { theEngine } from "./runs.js";
import { answers, inForce, state } from "./state.js";

export function drawExport() {
  const box = find("export"), on = inForce();
  const opened = box.querySelector("details")?.open;
  const lines = element("pre", { tabindex: 0, "aria-label": "Python that uses the spec file" }, python());
  const save = button("Download spec file", () => download(on), { id: "download", disabled: !on.length });
  const take = button("Copy Python", () => copy(python(), take));
  box.replaceChildren(element("div", { class: "bar" }, save, take), element("details", { open: opened }, element("summary", {}, "Use the file in Python"), lines));
}

// A text, or the two texts of a pair.
function asked() {
  const { pair } = theEngine().manifest.model, at = pair ? state.prompt.indexOf(pair.between) : -1, text = JSON.stringify;
  return at < 0 ? text(state.prompt) : `(${text(state.prompt.slice(0, at))}, ${text(state.prompt.slice(at + pair.between.length))})`;
}

export function python() {
  const { source, bits } = theEngine().manifest.model, on = inForce(), text = JSON.stringify;
  const options = (source.dtype ? `, dtype=${text(source.dtype)}` : "") + (bits.length ? ", accuracy_level=0" : ""); // which rounds nothing else
  return [
    "from mionnx import HookSpec, MIModel", "",
    "# the model, as it was opened when this page was made", `model = MIModel.from_pretrained(${text(source.name)}${options})`, `prompt = ${asked()}`,
    on.length ? `spec = HookSpec.load(${text(fileName())})  # the downloaded file` : "spec = HookSpec()  # nothing is switched on",
    ...(continues() ? continued(on) : [WHOLE[head()]()]),
  ].join("\n");
}

function continued(on) {
  const logits = on.some(({ positions }) => positions === "generated") ? [] : ["logits = model.forward(prompt, spec).output()[0, -1]"];
  return [...logits, `print(model.generate(prompt, spec, max_new_tokens=${state.count}).texts[0])`];
}

// The line of a model that reads texts whole.
const WHOLE = {
  masked_lm: () => (answers.tokens.includes(theEngine().manifest.model.mask?.id) ? "print(model.fill_mask(prompt, hooks=spec))" : "print(model.forward(prompt, spec).output().shape)"),
  classes: () => "print(model.classify(prompt, spec))",
  token_classes: () => "print(model.tag(prompt, spec))",
  embedding: () => `print(model.similarity(model.embed(prompt, spec), ${JSON.stringify(answers.others.map(({ text }) => text))}))`,
};

function fileName() { return theEngine().manifest.model.name.replace(/[^A-Za-z0-9._-]+/g, "-") + "-spec.safetensors"; }

async function download(interventions) {
  try {
    const bytes = await theEngine().exportSpec({ interventions, tokens: answers.tokens });
    const link = element("a", { href: URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" })), download: fileName() });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    notice("The spec file could not be made: " + sentence(error), "export");
  }
}

export function listenShare() {
  find("share").addEventListener("click", async ({ target }) => {
    const { origin, pathname } = location, name = theEngine()?.manifest.model.name;
    copy(origin + pathname + (name ? "#" + await writeLink(state, name) : ""), target, "Link copied");
  });
}
