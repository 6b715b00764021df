// The status view: samples of the metrics page, drawn as they come.

import { metricsText } from "./api.js";
import { Chart } from "./charts.js";
import { element, find } from "./dom.js";
import { growth, parse, quantile, total } from "./metrics.js";

const INTERVAL_MS = 2000;
const WINDOW_MS = 60_000;
const STAGES = [
  ["Decode an image", "saccade:image_decode_seconds"],
  ["Resize it, cut it into patches", "saccade:image_preprocess_seconds"],
  ["Until the prompt is ready", "saccade:request_preprocess_seconds"],
  ["From there to the first token", "saccade:request_prefill_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
];

const count = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1));
const whole = (value) => Math.round(value).toLocaleString("en");
const compact = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1));
const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const time = (seconds) => (seconds === 0 ? "0" : seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`);
const bytes = (value) => (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : value === 0 ? "0" : `${(value / 2 ** 20).toFixed(0)} MiB`);

const samples = [];
let charts = null;
let timer = null;

/** Start sampling when the view is shown, stop when it is not. */
export function showStatus(isShown) {
  clearInterval(timer);
  timer = null;
  if (!isShown) return;
  charts ??= makeCharts();
  refresh();
  timer = setInterval(() => document.hidden || refresh(), INTERVAL_MS);
}

function makeCharts() {
  const made = [
    new Chart({ title: "Load", series: ["Running", "Waiting"], format: count, least: 4 }),
    new Chart({ title: "Tokens per second", series: ["Output", "Prompt"], format: compact, least: 10 }),
    new Chart({ title: "Time to first token", series: ["p50", "p95"], format: time, least: 0.05 }),
    new Chart({ title: "Time between tokens", series: ["p50", "p95"], format: time, least: 0.01 }),
    new Chart({ title: "Cache hits", series: ["Prefix", "Encoder", "Images"], format: percent }),
    new Chart({ title: "KV cache in use", series: ["Pages"], format: percent }),
    new Chart({ title: "Memory", series: ["Processes", "Images"], format: bytes, least: 2 ** 28, unit: 2 ** 30 }),
  ];
  find("charts").prepend(...made.map(({ node }) => node));
  return made;
}

async function refresh() {
  let text;
  try {
    text = await metricsText();
  } catch (error) {
    find("status-line").textContent = error.status === 401 ? "The API key is missing or wrong: set it in Settings" : error.message;
    return;
  }
  const now = performance.now();
  samples.push({ at: now, sample: parse(text) });
  while (samples.length > 2 && samples[1].at < now - WINDOW_MS) samples.shift();
  render();
}

function render() {
  const { at, sample } = samples.at(-1);
  const previous = samples.at(-2) ?? samples[0];
  const oldest = samples[0].sample;
  const seconds = Math.max((at - previous.at) / 1000, 1e-3);
  const rate = (name) => (samples.length < 2 ? null : perSecond(growth(previous.sample, sample, name), seconds));
  const share = (hits, queries) => ratio(growth(oldest, sample, hits), growth(oldest, sample, queries));
  const percentiles = (name) => [0.5, 0.95].map((q) => quantile(oldest, sample, name, q));
  const [load, tokens, first, gap, caches, pages, memory] = charts;

  const running = total(sample, "vllm:num_requests_running");
  const waiting = total(sample, "vllm:num_requests_waiting");
  const output = rate("vllm:generation_tokens_total");
  const firstToken = percentiles("vllm:time_to_first_token_seconds");
  load.push([running, waiting]);
  tokens.push([output, rate("vllm:prompt_tokens_total")]);
  first.push(firstToken);
  gap.push(percentiles("vllm:inter_token_latency_seconds"));
  caches.push([
    share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    share("saccade:encoder_cache_hits_total", "saccade:encoder_cache_queries_total"),
    share("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
  ]);
  const usage = total(sample, "vllm:kv_cache_usage_perc");
  pages.push([usage]);
  memory.push([total(sample, "saccade:process_resident_memory_bytes"), total(sample, "saccade:processed_image_cache_bytes")]);
  renderTiles(sample, { running, waiting, output, first: firstToken[0], usage });
  renderStages(sample, oldest);
  find("status-line").textContent = `Live, up ${uptime(sample)}`;
}

const perSecond = (count, seconds) => (count === null ? null : count / seconds);
const ratio = (part, whole) => (part === null || !whole ? null : part / whole);

function renderTiles(sample, { running, waiting, output, first, usage }) {
  const finished = total(sample, "vllm:request_success_total") ?? 0;
  const tiles = [
    ["Running", running, whole],
    ["Waiting", waiting, whole],
    ["Output tokens/s", output, compact],
    ["First token, p50", first, time],
    ["KV cache used", usage, percent],
    ["Requests done", finished, whole],
  ];
  const nodes = tiles.map(([name, value, format]) =>
    element("li", {}, element("span", { class: "name" }, name), element("span", { class: "value" }, value === null ? "–" : format(value))),
  );
  find("tiles").replaceChildren(...nodes);
}

function renderStages(sample, oldest) {
  const cell = (value) => element("td", {}, value === null ? "–" : time(value));
  const rows = STAGES.filter(([, name]) => sample.has(`${name}_count`)).map(([label, name]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, label),
      element("td", {}, whole(growth(oldest, sample, `${name}_count`) ?? 0)),
      cell(quantile(oldest, sample, name, 0.5)),
      cell(quantile(oldest, sample, name, 0.95)),
    ),
  );
  find("stages").replaceChildren(...rows);
}

function uptime(sample) {
  const started = total(sample, "process_start_time_seconds");
  if (started === null) return "for an unknown time";
  const minutes = Math.floor((Date.now() / 1000 - started) / 60);
  if (minutes < 1) return "less than a minute";
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
