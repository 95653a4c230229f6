// node measure.mjs MODEL TEXT PROMPT STEPS PLACES OUT: times of node-llama-cpp and what it finds likely, as JSON.
// It is copied beside node_modules; whether kvpact is there is for GGML_BACKEND_PATH to say.
import fs from "fs";
import {getLlama} from "node-llama-cpp";

const [file, text, prompt, steps, places, out] = process.argv.slice(2);
const n = Number(prompt), timed = n + Number(steps), end = timed + Number(places);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error"});
const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
const context = await model.createContext({
  contextSize: end + 64, batchSize: 512, threads: 1, flashAttention: true,
  experimentalKvCacheKeyType: "Q8_0", experimentalKvCacheValueType: "Q8_0"
});
const sequence = context.getSequence();
const tokens = model.tokenize(fs.readFileSync(text, "utf8").slice(0, 8 * end));

// Of the processor, by the one thread: what else runs on the machine prolongs other times.
const ms = (since) => { const {user, system} = process.cpuUsage(since); return (user + system) / 1e3; };
let begin = process.cpuUsage();
await sequence.evaluateWithoutGeneratingNewTokens(tokens.slice(0, n));
const found = {prompt: ms(begin) / n, steps: [], likely: []};
for (let i = n; i < timed; i++) {
  begin = process.cpuUsage();
  await sequence.controlledEvaluate([[tokens[i], {generateNext: {token: true}}]]);
  found.steps.push(ms(begin));
}
for (let i = timed; i < end; i++) {
  const [one] = await sequence.controlledEvaluate([[tokens[i], {generateNext: {probabilities: true}}]]);
  const likely = new Array(one.next.probabilities.size).fill(0);
  for (const [token, x] of one.next.probabilities) likely[token] = x;
  found.likely.push(likely);
}
fs.writeFileSync(out, JSON.stringify(found));
await llama.dispose();
