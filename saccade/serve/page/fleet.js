// The fleet view: versions and their users, replicas and their load, decisions of the controller.

import { fleetStatus } from "./api.js";
import { drawing, element, find } from "./dom.js";
import { percent, time, whole } from "./format.js";

const INTERVAL_MS = 3000;
const AWAY_S = 10;
const MAX_REPLICAS = 24;

let timer = null;
let isReading = false;

/** Read the state of the fleet while the view is shown. */
export function showFleet(isShown) {
  clearInterval(timer);
  timer = null;
  if (!isShown) return;
  refresh();
  timer = setInterval(() => document.hidden || refresh(), INTERVAL_MS);
}

async function refresh() {
  if (isReading) return;
  isReading = true;
  try {
    render(await fleetStatus());
  } catch (error) {
    say(error.status === 401 ? "The server needs an API key" : error.message, true);
  } finally {
    isReading = false;
  }
}

function say(sentence, isProblem) {
  const line = find("fleet-line");
  if (line.textContent !== sentence) line.textContent = sentence;
  line.classList.toggle("away", isProblem);
}

function render(fleet) {
  const isAway = fleet.view_age_s > AWAY_S;
  const fronts = `${fleet.num_fronts} ${fleet.num_fronts === 1 ? "front" : "fronts"}`;
  if (isAway) say(`The controller has not answered for ${time(fleet.view_age_s)}: versions and users stay as they are`, true);
  else if (fleet.generation === 0) say("The controller has not answered yet", true);
  else say(`${fleet.name}, generation ${fleet.generation}, ${fronts}`, false);
  renderTiles(fleet.models.flatMap(({ versions }) => versions));
  find("fleet-models").replaceChildren(...fleet.models.map(modelCard));
  find("decisions").replaceChildren(...fleet.decisions.toReversed().map(decision));
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const isReady = (replica) => !replica.is_draining;
const residency = (versions) => {
  const patches = sum(versions.map((version) => version.patches));
  return patches ? percent(sum(versions.map((version) => version.patches_resident)) / patches) : "–";
};

function renderTiles(versions) {
  const replicas = versions.flatMap((version) => version.replicas);
  const tiles = [
    ["Replicas ready", whole(replicas.filter(isReady).length)],
    ["Requests", whole(sum(replicas.map(({ requests }) => requests)))],
    ["Longest queue", replicas.length ? time(Math.max(...replicas.map(({ queue_s }) => queue_s))) : "–"],
    ["Images resident", residency(versions)],
    ["Continued", whole(sum(versions.map((version) => version.requests_continued)))],
    ["Lost", whole(sum(versions.map((version) => version.requests_lost)))],
  ];
  const nodes = tiles.map(([name, value]) =>
    element("li", {}, element("span", { class: "name" }, name), element("span", { class: "value" }, value)),
  );
  find("fleet-tiles").replaceChildren(...nodes);
}

function modelCard({ name, versions, experiments }) {
  const nodes = [...versions.map(versionNode), ...experiments.map(experimentNode)];
  return element("section", { class: "card model-card" }, element("h3", {}, name), ...nodes);
}

function versionNode(version) {
  const { name, state, share, replicas } = version;
  const numReady = replicas.filter(isReady).length;
  const facts = [
    `${whole(numReady)} ${numReady === 1 ? "replica" : "replicas"}`,
    version.encoders === null ? null : `${whole(version.encoders)} ${version.encoders === 1 ? "encoder" : "encoders"}`,
    version.patches ? `images resident ${residency([version])}` : null,
    `${whole(version.requests_continued)} continued, ${whole(version.requests_lost)} lost`,
    version.adapters.length ? `adapters ${version.adapters.join(", ")}` : null,
  ];
  return element(
    "div",
    { class: "version" },
    element(
      "p",
      { class: "version-head" },
      element("b", {}, name),
      element("span", { class: `phase ${state}` }, state),
      element("span", { class: "users" }, `${percent(share)} of users`),
    ),
    shareBar(share),
    element("p", { class: "help" }, facts.filter(Boolean).join(" · ")),
    replicas.length ? replicaTable(replicas) : null,
  );
}

function shareBar(share) {
  const filled = drawing("rect", { width: 100 * share, height: 1 });
  return drawing("svg", { class: "share", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" }, filled);
}

/** Replicas by name; of many, those with the longest queues. */
function replicaTable(replicas) {
  const longest = replicas.toSorted((a, b) => b.queue_s - a.queue_s || b.requests - a.requests).slice(0, MAX_REPLICAS);
  const shown = longest.toSorted((a, b) => (a.name < b.name ? -1 : 1));
  const rows = shown.map((replica) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, replica.is_draining ? `${replica.name}, draining` : replica.name),
      element("td", {}, whole(replica.requests)),
      element("td", {}, time(replica.queue_s)),
    ),
  );
  const heads = ["Replica", "Requests", "Queue"].map((name) => element("th", { scope: "col" }, name));
  const rest = replicas.length - shown.length;
  return element(
    "table",
    { class: "replicas" },
    rest ? element("caption", { class: "help" }, `${whole(rest)} more with shorter queues`) : null,
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rows),
  );
}

/** An experiment: numbers of its variants, and what is known of their differences. */
function experimentNode({ experiment, is_running, failure, share, sample_ratio, variants, comparisons }) {
  const state = failure ? "rolled back" : is_running ? "runs" : "waits for its versions";
  const problem = failure || (sample_ratio.is_as_expected ? "" : "Users are missing from a variant: there is no verdict");
  return element(
    "div",
    { class: "version" },
    element(
      "p",
      { class: "version-head" },
      element("b", {}, `Experiment ${experiment}`),
      element("span", { class: `phase ${is_running ? "ready" : ""}` }, state),
      element("span", { class: "users" }, `${percent(share)} of users`),
    ),
    problem ? element("p", { class: "help danger" }, problem) : null,
    ...Object.entries(variants).map(variantLine),
    ...comparisons.map(verdictLine),
  );
}

const measured = (metric, value) => (metric === "ttft" || metric === "tpot" ? time(value) : percent(value));
const signed = (metric, value) => `${value < 0 ? "−" : "+"}${measured(metric, Math.abs(value))}`;

function variantLine([name, { users, requests, means }]) {
  const known = Object.entries(means).filter(([, mean]) => mean !== null);
  const parts = [`${whole(users)} users`, `${whole(requests)} requests`];
  const facts = [...parts, ...known.map(([metric, mean]) => `${metric} ${measured(metric, mean)}`)].join(" · ");
  return element("p", { class: "help" }, element("b", {}, `${name}: `), facts);
}

function verdictLine({ metric, variant, control, difference, low, high, verdict }) {
  const interval =
    difference === undefined
      ? ""
      : ` (${signed(metric, difference)}, between ${signed(metric, low)} and ${signed(metric, high)})`;
  return element("p", { class: "help" }, `${variant} to ${control}, ${metric}: ${verdict}${interval}`);
}

function decision({ time: at, what, reason, model, version, share }) {
  const moment = new Date(at * 1000);
  const said = moment.toLocaleString();
  const about = [model, version].filter(Boolean).join(" ");
  const change = share === null ? what : `${what}, ${percent(share)} of users`;
  return element(
    "li",
    {},
    element("time", { datetime: moment.toISOString() }, said),
    element("div", {}, element("b", {}, about ? `${about}: ` : ""), change, element("div", { class: "reason" }, reason)),
  );
}
