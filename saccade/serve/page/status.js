// The status view: what the server has recorded, also before the view was opened.

import { recordedMetrics } from "./api.js";
import { Chart } from "./charts.js";
import { element, find } from "./dom.js";
import { bytes, compact, count, percent, time, whole } from "./format.js";
import { Recording } from "./recording.js";

const INTERVAL_MS = 2000;
const STAGES = [
  ["Decode an image", "saccade:image_decode_seconds"],
  ["Resize it, cut it into patches", "saccade:image_preprocess_seconds"],
  ["Until the prompt is ready", "saccade:request_preprocess_seconds"],
  ["From there to the first token", "saccade:request_prefill_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
];

const recording = new Recording();
let charts = null;
let timer = null;
let isReading = false;

/** Read what is new while the view is shown. */
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
  if (isReading) return;
  isReading = true;
  const recorded = await recordedMetrics(recording.at.at(-1) ?? 0).catch((error) => {
    find("status-line").textContent = error.status === 401 ? "The server needs an API key" : error.message;
  });
  isReading = false;
  if (!recorded) return;
  recording.append(recorded);
  if (recording.at.length) render();
}

function render() {
  const columns = recording.columns();
  const end = recording.at.length;
  const now = { from: end - 1, to: end };
  const draw = (chart, ...readers) => {
    const times = columns.map(({ to }) => recording.at[to - 1]);
    chart.show(
      times,
      readers.map((read) => ({ values: columns.map(read), now: read(now) })),
    );
  };
  const value = (name) => (span) => recording.value(name, span);
  const rate = (name) => (span) => recording.rate(name, span);
  const share = (hits, queries) => (span) => recording.share(hits, queries, recording.minute(span));
  const quantile = (name, q) => (span) => recording.quantile(name, q, recording.minute(span));
  const [load, tokens, first, gap, caches, pages, memory] = charts;
  draw(load, value("vllm:num_requests_running"), value("vllm:num_requests_waiting"));
  draw(tokens, rate("vllm:generation_tokens_total"), rate("vllm:prompt_tokens_total"));
  draw(first, quantile("vllm:time_to_first_token_seconds", 0.5), quantile("vllm:time_to_first_token_seconds", 0.95));
  draw(gap, quantile("vllm:inter_token_latency_seconds", 0.5), quantile("vllm:inter_token_latency_seconds", 0.95));
  draw(
    caches,
    share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    share("saccade:encoder_cache_hits_total", "saccade:encoder_cache_queries_total"),
    share("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
  );
  draw(pages, value("vllm:kv_cache_usage_perc"));
  draw(memory, value("saccade:process_resident_memory_bytes"), value("saccade:processed_image_cache_bytes"));
  renderTiles(now);
  renderStages(recording.minute(now));
  find("status-line").textContent = `Live, up ${uptime()}`;
}

function renderTiles(now) {
  const tiles = [
    ["Running", recording.value("vllm:num_requests_running", now), whole],
    ["Waiting", recording.value("vllm:num_requests_waiting", now), whole],
    ["Output tokens/s", recording.rate("vllm:generation_tokens_total", now), compact],
    ["First token, p50", recording.quantile("vllm:time_to_first_token_seconds", 0.5, recording.minute(now)), time],
    ["KV cache used", recording.value("vllm:kv_cache_usage_perc", now), percent],
    ["Requests done", recording.value("vllm:request_success_total", now), whole],
  ];
  const nodes = tiles.map(([name, value, format]) =>
    element(
      "li",
      {},
      element("span", { class: "name" }, name),
      element("span", { class: "value" }, value === null ? "–" : format(value)),
    ),
  );
  find("tiles").replaceChildren(...nodes);
}

function renderStages(span) {
  const cell = (value) => element("td", {}, value === null ? "–" : time(value));
  const rows = STAGES.map(([label, name]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, label),
      element("td", {}, whole(recording.count(name, span))),
      cell(recording.quantile(name, 0.5, span)),
      cell(recording.quantile(name, 0.95, span)),
    ),
  );
  find("stages").replaceChildren(...rows);
}

function uptime() {
  const minutes = Math.floor((recording.at.at(-1) - recording.startedAt) / 60);
  if (minutes < 1) return "less than a minute";
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
