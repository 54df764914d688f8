// The playground's tokenizer under Node: `node playground_tokens.mjs LIBRARY ENGINE FOLDER < texts.json` prints, for each
// text, its ids, these decoded, and the texts of the tokens alone.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, engine, folder] = process.argv.slice(2);
const { Tokens } = await import(pathToFileURL(`${engine}/tokens.js`));
const { Tokenizer } = await import(pathToFileURL(library));
const read = (name) => JSON.parse(readFileSync(`${folder}/${name}`, "utf8"));
const tokens = new Tokens(Tokenizer, read("tokenizer.json"), read("tokenizer_config.json"), { vocabulary: 2 ** 31 });
const texts = JSON.parse(readFileSync(0, "utf8"));
const found = texts.map((text) => {
  const ids = tokens.encode(text);
  return [ids, tokens.decode(ids), ids.map((id) => tokens.text(id))];
});
process.stdout.write(JSON.stringify(found));
