// Sampling settings: a form whose values last as long as the tab.

import { find } from "./dom.js";
import { recall, remember } from "./storage.js";

const STORED = "saccade.settings";
/** Request fields by the id of their input; an empty input leaves the field out. */
const NUMBERS = {
  temperature: "temperature",
  top_p: "top_p",
  max_tokens: "max_completion_tokens",
  seed: "seed",
  top_k: "top_k",
  min_p: "min_p",
  repetition_penalty: "repetition_penalty",
  presence_penalty: "presence_penalty",
  frequency_penalty: "frequency_penalty",
};
const NAMES = [...Object.keys(NUMBERS), "stop_texts", "format", "schema", "fps", "system"];
const DEFAULTS = Object.fromEntries(NAMES.map((name) => [name, find(name).value]));
const MAX_STOPS = 16;

/** A setting that cannot be sent. `field` is the id of its input. */
export class SettingProblem extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Restore the form and keep it stored. */
export function setUpSettings() {
  const stored = JSON.parse(recall(STORED) ?? "{}");
  for (const name of NAMES) find(name).value = stored[name] ?? DEFAULTS[name];
  showValues();
  find("settings-form").addEventListener("input", store);
  find("settings-form").addEventListener("submit", (event) => event.preventDefault());
  find("reset-settings").addEventListener("click", () => {
    for (const name of NAMES) if (name !== "system") find(name).value = DEFAULTS[name];
    store();
  });
  find("open-settings").addEventListener("click", () => toggle(find("settings").hidden));
  find("close-settings").addEventListener("click", () => toggle(false));
  find("settings").addEventListener("keydown", (event) => {
    if (event.key === "Escape") toggle(false);
  });
}

function store() {
  remember(STORED, JSON.stringify(Object.fromEntries(NAMES.map((name) => [name, find(name).value]))));
  showValues();
}

function showValues() {
  for (const name of ["temperature", "top_p"]) find(`${name}-value`).value = Number(find(name).value).toFixed(2);
  find("schema-field").hidden = find("format").value !== "json_schema";
}

function toggle(isOpen) {
  find("settings").hidden = !isOpen;
  find("open-settings").setAttribute("aria-expanded", String(isOpen));
  find(isOpen ? "settings-title" : "open-settings").focus();
}

/** Open the settings at a field. */
export function showField(id) {
  toggle(true);
  const details = find(id).closest("details");
  if (details) details.open = true;
  find(id).focus();
}

// ------------------------------------------------------------------ fields of a request

/** Fields of a request other than its messages; throws a SettingProblem. */
export function requestSettings(model) {
  return { model, system: find("system").value.trim(), fps: number("fps"), sampling: sampling() };
}

function sampling() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const value = number(id);
    if (value !== null) fields[name] = value;
  }
  const stops = find("stop_texts").value.split("\n").filter(Boolean);
  if (stops.length > MAX_STOPS)
    throw new SettingProblem("stop_texts", `There are ${stops.length} stop texts; use up to ${MAX_STOPS}.`);
  if (stops.length) fields.stop = stops;
  const format = responseFormat();
  if (format) fields.response_format = format;
  return fields;
}

function number(id) {
  const input = find(id);
  if (!input.checkValidity())
    throw new SettingProblem(id, `${input.labels[0].textContent}: ${input.validationMessage}`);
  return input.value === "" ? null : Number(input.value);
}

function responseFormat() {
  const type = find("format").value;
  if (type === "text") return null;
  if (type === "json_object") return { type };
  return { type, json_schema: { name: "answer", schema: schema() } };
}

function schema() {
  let parsed;
  try {
    parsed = JSON.parse(find("schema").value);
  } catch (error) {
    throw new SettingProblem("schema", `The JSON schema is not valid JSON: ${error.message}`);
  }
  if (parsed === null || typeof parsed !== "object" || Array.isArray(parsed))
    throw new SettingProblem("schema", 'The JSON schema is not an object, such as {"type": "object"}.');
  return parsed;
}
