// The text format of Prometheus: parse it, and take rates and percentiles between two samples.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

const toNumber = (text) => (text === "+Inf" ? Infinity : Number(text));

/** A sample: for each metric name, its values with their labels. */
export function parse(text) {
  const sample = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const entry = { labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, content]) => [key, content])) };
    entry.value = toNumber(value);
    if (!sample.has(name)) sample.set(name, []);
    sample.get(name).push(entry);
  }
  return sample;
}

const matches = (labels, wanted) => Object.entries(wanted).every(([key, value]) => labels[key] === value);

/** The sum of a metric over all labels but the wanted ones; null if the server does not have it. */
export function total(sample, name, wanted = {}) {
  const entries = sample?.get(name)?.filter(({ labels }) => matches(labels, wanted)) ?? [];
  return entries.length ? entries.reduce((sum, entry) => sum + entry.value, 0) : null;
}

/** By how much a counter has grown between two samples; a restarted server counts from zero. */
export function growth(before, after, name, wanted = {}) {
  const end = total(after, name, wanted);
  if (end === null) return null;
  const start = total(before, name, wanted) ?? 0;
  return end >= start ? end - start : end;
}

/** A percentile of a histogram's observations between two samples, interpolated inside its bucket; null without observations. */
export function quantile(before, after, name, q, wanted = {}) {
  const bounds = new Map();
  for (const { labels } of after?.get(`${name}_bucket`) ?? []) {
    if (!matches(labels, wanted) || bounds.has(labels.le)) continue;
    bounds.set(labels.le, growth(before, after, `${name}_bucket`, { ...wanted, le: labels.le }));
  }
  const buckets = [...bounds].map(([le, count]) => [toNumber(le), count]).sort(([a], [b]) => a - b);
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count <= 0) return null;
  const rank = q * count;
  let [low, below] = [0, 0];
  for (const [bound, cumulative] of buckets) {
    if (cumulative >= rank) return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (cumulative - below || 1);
    [low, below] = [bound, cumulative];
  }
  return low;
}
