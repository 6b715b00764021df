// What the server has recorded of its metrics: samples in columns, and what they say about a span of time.

const KEPT_S = 1800;
const WINDOW_S = 60;
const MAX_COLUMNS = 180;

/** Samples that were received, the oldest first. Spans are pairs of indices, the end not included. */
export class Recording {
  at = [];
  intervalS = 2;
  startedAt = null;
  #values = {};
  #increases = {};
  #histograms = {};

  /** Add samples as `/metrics/history` sends them; those older than half an hour are dropped. */
  append({ started_at, interval_s, at, values, increases, histograms }) {
    this.startedAt = started_at;
    this.intervalS = interval_s;
    this.at.push(...at);
    const old = this.at.findIndex((time) => time >= this.at.at(-1) - KEPT_S);
    this.at.splice(0, Math.max(0, old));
    const extend = (columns, name, added) => {
      const whole = [...(columns[name] ?? []), ...added];
      columns[name] = whole.slice(whole.length - this.at.length);
    };
    for (const [name, column] of Object.entries(values)) extend(this.#values, name, column);
    for (const [name, column] of Object.entries(increases)) extend(this.#increases, name, column);
    for (const [name, { bounds, observations }] of Object.entries(histograms)) {
      this.#histograms[name] ??= { bounds: [], observations: [] };
      if (bounds.length) this.#histograms[name].bounds = bounds;
      extend(this.#histograms[name], "observations", observations);
    }
  }

  /** The spans of a chart, few enough to be drawn. They begin at multiples of their length, so that they stay the
   *  same as time passes. */
  columns() {
    const span = this.intervalS * Math.max(1, Math.ceil(this.at.length / MAX_COLUMNS));
    const columns = [];
    for (const [index, time] of this.at.entries()) {
      const number = Math.floor(time / span);
      if (columns.at(-1)?.number === number) columns.at(-1).to = index + 1;
      else columns.push({ number, from: index, to: index + 1 });
    }
    return columns;
  }

  /** The last minute up to the end of a span. */
  minute({ to }) {
    const from = this.at.findIndex((time) => time > this.at[to - 1] - WINDOW_S);
    return { from, to };
  }

  /** The average of a gauge over a span; null if the server did not have it. */
  value(name, { from, to }) {
    const known = (this.#values[name] ?? []).slice(from, to).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  }

  /** How much a counter grew in a span. */
  increase(name, { from, to }) {
    const known = (this.#increases[name] ?? []).slice(from, to).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
  }

  /** How much a counter grew per second; the first sample covers no time. */
  rate(name, { from, to }) {
    if (from === 0) return to > 1 ? this.rate(name, { from: 1, to }) : null;
    const increase = this.increase(name, { from, to });
    return increase === null ? null : increase / Math.max(1e-3, this.at[to - 1] - this.at[from - 1]);
  }

  /** One counter's growth as a share of another's. */
  share(part, whole, span) {
    const [grown, all] = [this.increase(part, span), this.increase(whole, span)];
    return grown === null || !all ? null : grown / all;
  }

  #counts(name, { from, to }) {
    const { bounds, observations } = this.#histograms[name] ?? { bounds: [], observations: [] };
    const counts = new Array(bounds.length + 1).fill(0);
    for (const sample of observations.slice(from, to)) for (const [bucket, count] of sample) counts[bucket] += count;
    return { bounds, counts };
  }

  /** How much a histogram observed in a span. */
  count(name, span) {
    return this.#counts(name, span).counts.reduce((sum, count) => sum + count, 0);
  }

  /** A percentile of what a histogram observed in a span, interpolated inside its bucket; null without observations. */
  quantile(name, q, span) {
    const { bounds, counts } = this.#counts(name, span);
    let left = q * counts.reduce((sum, count) => sum + count, 0);
    if (left === 0) return null;
    for (const [bucket, count] of counts.entries()) {
      const low = bucket === 0 ? 0 : bounds[bucket - 1];
      if (count > 0 && left <= count)
        return bucket === bounds.length ? low : low + ((bounds[bucket] - low) * left) / count;
      left -= count;
    }
    return bounds.at(-1) ?? null;
  }
}
