// Line charts in SVG: a few series over the same time, one axis from zero.

import { drawing, element } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 132;
const LEFT = 44;
const TOP = 8;
const BOTTOM = 22;
const LEAST_SPAN_S = 60;
const GAP_S = 30;

/** A card with a legend of current values and a plot of each series over time. */
export class Chart {
  node = element("section", { class: "card" });
  #format;
  #least;
  #unit;
  #series;
  #plot = drawing("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  #title;

  constructor({ title, series, format, least = 1, unit = 1 }) {
    [this.#title, this.#format, this.#least, this.#unit] = [title, format, least, unit];
    this.#series = series.map((name, index) => ({ name, index, values: [], shown: element("b", {}, "–") }));
    const legend = element("p", { class: "legend" }, ...this.#series.map(key));
    this.node.append(element("h3", {}, title), legend, this.#plot);
    this.#draw([]);
  }

  /** Show the values of each series at these Unix times, null where there is none, and its value now. */
  show(times, series) {
    for (const [index, { values, now }] of series.entries()) {
      this.#series[index].values = values;
      this.#series[index].shown.textContent = now === null ? "–" : this.#format(now);
    }
    this.#draw(times);
  }

  #draw(times) {
    const known = this.#series.flatMap(({ values }) => values.filter((value) => value !== null));
    const top = niceCeiling(Math.max(this.#least, ...known) / this.#unit) * this.#unit;
    const said = this.#series.map(({ name, shown }) => `${name} ${shown.textContent}`).join(", ");
    this.#plot.setAttribute("aria-label", `${this.#title}: ${said}`);
    const spanS = Math.max(LEAST_SPAN_S, times.at(-1) - times[0] || 0);
    const lines = this.#series.toReversed().flatMap((series) => this.#lines(series, top, times, spanS));
    this.#plot.replaceChildren(...this.#axis(top), ...timeAxis(spanS), ...lines);
  }

  #axis(top) {
    return [0, 0.5, 1].flatMap((share) => {
      const y = height(share);
      return [
        drawing("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y, y2: y }),
        drawing("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.#format(top * share)),
      ];
    });
  }

  #lines({ index, values }, top, times, spanS) {
    const place = (time) => WIDTH - ((times.at(-1) - time) / spanS) * (WIDTH - LEFT);
    const points = values.flatMap((value, at) => {
      const point = value === null ? null : [place(times[at]), height(value / top)];
      return times[at] - times[at - 1] > GAP_S ? [null, point] : [point];
    });
    return runs(points).flatMap((run) => {
      const path = run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
      const line = drawing("path", { class: `series series-${index}`, d: run.length > 1 ? `M${path}` : `M${path}h0.1` });
      if (index !== 0 || run.length < 2) return [line];
      const area = `M${path}V${height(0)}H${run[0][0].toFixed(1)}Z`;
      return [drawing("path", { class: "area-0", d: area }), line];
    });
  }
}

/** How long ago the plot begins. */
function timeAxis(spanS) {
  const start = spanS < 120 ? `${Math.round(spanS)} s ago` : `${Math.round(spanS / 60)} min ago`;
  return [
    drawing("text", { x: LEFT, y: HEIGHT - 4 }, start),
    drawing("text", { x: WIDTH, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
  ];
}

/** Where a share of the axis is drawn. */
const height = (share) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);

function key({ name, index, shown }) {
  const line = drawing("line", { class: `series series-${index}`, x1: 1, x2: 27, y1: 5, y2: 5 });
  return element("span", { class: "key" }, drawing("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" }, line), `${name} `, shown);
}

/** Consecutive points without gaps. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point !== null) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((run) => run.length);
}

/** The next of 1, 2, 5, 10, 20, ... */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= value * 0.999);
}
