// The list as a spec file for Python, with the lines that use it; the address as a link.
import { button, copy, element, find, notice, sentence } from "./dom.js";
import { writeLink } from "./link.js";
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

export function python() {
  const { source, bits } = theEngine().manifest.model, on = inForce(), text = JSON.stringify;
  const options = (source.dtype ? `, dtype=${text(source.dtype)}` : "") + (bits.length ? ", accuracy_level=0" : ""); // which rounds nothing else
  return [
    "from mionnx import HookSpec, MIModel", "",
    "# the model, as it was opened when this page was made", `model = MIModel.from_pretrained(${text(source.name)}${options})`, `prompt = ${text(state.prompt)}`,
    on.length ? `spec = HookSpec.load(${text(fileName())})  # the downloaded file` : "spec = HookSpec()  # nothing is switched on",
    ...(on.some(({ positions }) => positions === "generated") ? [] : ["logits = model.forward(prompt, spec).output()[0, -1]"]),
    `print(model.generate(prompt, spec, max_new_tokens=${state.count}).texts[0])`,
  ].join("\n");
}

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
