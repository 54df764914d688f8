// onnxruntime-node alone: greedy tokens of one row of ids. Arguments and result: see genai.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const ort = createRequire(`${process.cwd()}/`)("onnxruntime-node");
const [folder, file] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(file));
const session = await ort.InferenceSession.create(`${folder}/model.onnx`, { intraOpNumThreads: 1 });
const ARRAYS = { int64: BigInt64Array, float32: Float32Array, float16: Uint16Array };
const sizes = { batch_size: 1, past_sequence_length: 0 };
const whole = (numbers, dims) => new ort.Tensor("int64", BigInt64Array.from(numbers.map(BigInt)), dims);
let past = {};
for (const { name, type, shape } of session.inputMetadata) {
  if (!name.startsWith("past")) continue;
  const dims = shape.map((dim) => sizes[dim] ?? dim);
  past[name] = new ort.Tensor(type, new ARRAYS[type](dims.reduce((a, b) => a * b, 1)), dims);
}
const knobs = Object.entries(asked.knobs).map(([name, value]) => [name, new ort.Tensor("float32", [value], [])]);
let [tokens, monitors, seconds, ids, length] = [[], {}, [], asked.ids[0], 0];
for (let step = 0; step < asked.new; step += 1) {
  const positions = ids.map((_, at) => length + at);
  length += ids.length;
  const feeds = {
    input_ids: whole(ids, [1, ids.length]),
    attention_mask: whole(Array(length).fill(1), [1, length]),
    position_ids: whole(positions, [1, ids.length]),
    "mionnx.token_positions": whole(positions, [1, ids.length]),
    ...Object.fromEntries(knobs),
    ...past,
  };
  for (const name in feeds) if (!session.inputNames.includes(name)) delete feeds[name];
  const begin = process.cpuUsage();
  const out = await session.run(feeds);
  const spent = process.cpuUsage(begin);
  seconds.push((spent.user + spent.system) / 1e6);
  const { data, dims } = out.logits;
  const last = data.subarray(data.length - dims[2]);
  ids = [last.reduce((best, value, at) => (value > last[best] ? at : best), 0)];
  tokens.push(ids[0]);
  for (const name of asked.monitors) (monitors[name] ??= []).push([...out[name].data].slice(-out[name].dims.at(-1)));
  past = {};
  for (const name in out) {
    if (/^present/.test(name)) past[name.replace("present_state", "past_state").replace(/^present\./, "past_key_values.")] = out[name];
  }
  if (asked.end.includes(ids[0])) break;
}
console.log(JSON.stringify({ tokens: [tokens], monitors, seconds }));
