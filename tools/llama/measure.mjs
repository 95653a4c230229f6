// node measure.mjs MODEL TEXT PROMPT STEPS PLACES OUT: times of node-llama-cpp and what it finds likely, as JSON.
// It is copied beside node_modules; whether kvpact is there is for GGML_BACKEND_PATH to say.
import fs from "fs";
import {getLlama} from "node-llama-cpp";

const [file, text, prompt, steps, places, out] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error"});
const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
const context = await model.createContext({
  contextSize: 4096, batchSize: 512, threads: 1, flashAttention: true,
  experimentalKvCacheKeyType: "Q8_0", experimentalKvCacheValueType: "Q8_0"
});
const sequence = context.getSequence();
const tokens = model.tokenize(fs.readFileSync(text, "utf8").slice(0, 20000));
const n = Number(prompt), timed = n + Number(steps), end = timed + Number(places);

let begin = performance.now();
await sequence.evaluateWithoutGeneratingNewTokens(tokens.slice(0, n));
const found = {prompt: (performance.now() - begin) / n, steps: [], likely: []};
for (let i = n; i < timed; i++) {
  begin = performance.now();
  await sequence.controlledEvaluate([[tokens[i], {generateNext: {token: true}}]]);
  found.steps.push(performance.now() - begin);
}
for (let i = timed; i < end; i++) {
  const [one] = await sequence.controlledEvaluate([[tokens[i], {generateNext: {probabilities: true}}]]);
  const likely = new Array(one.next.probabilities.size).fill(0);
  for (const [token, x] of one.next.probabilities) likely[token] = x;
  found.likely.push(likely);
}
fs.writeFileSync(out, JSON.stringify(found));
await llama.dispose();
