// transformers.js alone: greedy tokens of rows of ids, padded on the left. Arguments and result: see genai.py.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { AutoModelForCausalLM, env, Tensor } from "@huggingface/transformers";

const [folder, file] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(file));
const { compiled } = await import(pathToFileURL(`${folder}/compiled.mjs`));
env.allowRemoteModels = false;
env.localModelPath = "";
const longest = Math.max(...asked.ids.map((row) => row.length));
const pad = (row, by) => [...Array(longest - row.length).fill(by), ...row];
const tensor = (rows) => new Tensor("int64", BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, longest]);
const monitors = Object.fromEntries(asked.monitors.map((name) => [name, []]));
const seconds = [];
const read = (out) => {
  for (const name in monitors) monitors[name].push(out[name].tolist()[0].at(-1));
  seconds.push(process.cpuUsage());
};
const options = { session_options: { intraOpNumThreads: 1, interOpNumThreads: 1 } };
const model = compiled(await AutoModelForCausalLM.from_pretrained(folder, options), asked.knobs, read);
const made = await model.generate({
  input_ids: tensor(asked.ids.map((row) => pad(row, asked.pad))),
  attention_mask: tensor(asked.ids.map((row) => pad(row.map(() => 1), 0))),
  max_new_tokens: asked.new,
  min_new_tokens: asked.least ?? 0,
  do_sample: false,
});
const spent = seconds.slice(1).map((one, at) => (one.user + one.system - seconds[at].user - seconds[at].system) / 1e6);
const tokens = made.tolist().map((row) => row.slice(longest).map(Number));
console.log(JSON.stringify({ tokens, monitors, seconds: spent }));
