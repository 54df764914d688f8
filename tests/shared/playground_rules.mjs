// A playground's engine under Node: `node playground_rules.mjs FOLDER < asked.json` prints for each list of entries the
// inputs of the graph and the spec file that the page would export, or why it refuses them.
// asked: {manifest, tensors, captured: {text: {hook: {shape, data}}}, prompt, cases: [entries]}; data as base64 of float32.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const engine = (name) => import(pathToFileURL(`${process.argv[2]}/engine/${name}.js`));
const [{ PlaygroundError }, { edits, needed, valueOf }, { inputs, stored }, { specBytes }] =
  await Promise.all(["errors", "interventions", "feeds", "spec_file"].map(engine));

const packed = ({ dims, data }) => ({ dims, data: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64") });
const unpacked = ({ shape, data }) => ({ shape, data: new Float32Array(new Uint8Array(Buffer.from(data, "base64")).buffer) });
const asked = JSON.parse(readFileSync(0, "utf8")), { manifest, prompt } = asked;
const tensors = Object.fromEntries(Object.entries(asked.tensors).map(([name, tensor]) => [name, unpacked(tensor)]));
const captured = (text, hook) => unpacked(asked.captured[text][hook]);
const call = { start: 0, count: prompt, prompt, length: prompt, generating: false };

async function answer(entries) {
  const all = edits(entries, manifest);
  needed(all);
  const values = all.map((edit) => valueOf(edit, captured, tensors));
  const feeds = inputs(all, values, manifest, call), parts = {};
  const declared = all.map((edit, n) => {
    const [entry, own] = stored(edit, values[n], prompt, manifest.engine.both);
    for (const [name, tensor] of Object.entries(own)) parts[`interventions.${n}.${name}`] = tensor;
    return entry;
  });
  const spec = Buffer.from(await specBytes(declared, parts)).toString("base64");
  return { spec, feeds: Object.fromEntries(Object.entries(feeds).map(([name, feed]) => [name, packed(feed)])) };
}

const found = [];
for (const entries of asked.cases) {
  found.push(await answer(entries).catch((error) => ({ refused: error.message, broken: !(error instanceof PlaygroundError) })));
}
process.stdout.write(JSON.stringify(found));
