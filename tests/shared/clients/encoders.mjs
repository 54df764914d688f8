// transformers.js alone: what it makes of texts, or of pairs. Arguments and result: see encoders.py.
import { readFileSync } from "node:fs";
import { AutoModelForSequenceClassification, AutoTokenizer, env, pipeline } from "@huggingface/transformers";

const [folder, file] = process.argv.slice(2);
const { texts } = JSON.parse(readFileSync(file));
env.allowRemoteModels = false;
env.localModelPath = "";
const options = { session_options: { intraOpNumThreads: 1, interOpNumThreads: 1 } };
let rows;
if (Array.isArray(texts[0])) {
  const tokenizer = await AutoTokenizer.from_pretrained(folder);
  const model = await AutoModelForSequenceClassification.from_pretrained(folder, options);
  const [first, second] = [0, 1].map((side) => texts.map((pair) => pair[side]));
  rows = (await model(tokenizer(first, { text_pair: second, padding: true, truncation: true }))).logits;
} else {
  const extractor = await pipeline("feature-extraction", folder, options);
  rows = await extractor(texts, { pooling: "mean", normalize: true });
}
console.log(JSON.stringify(rows.tolist()));
