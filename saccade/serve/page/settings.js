// Sampling and access settings: a form whose values last as long as the tab.

import { apiKey } from "./api.js";
import { find } from "./dom.js";

const STORED = "saccade.settings";
const NAMES = ["temperature", "top_p", "max_tokens", "seed", "system"];
const DEFAULTS = Object.fromEntries(NAMES.map((name) => [name, find(name).value]));

/** Restore the form and keep it stored; `onKey` is called when the key has changed. */
export function setUpSettings(onKey) {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  for (const name of NAMES) find(name).value = stored[name] ?? DEFAULTS[name];
  find("api-key").value = apiKey.get();
  showValues();
  find("settings-form").addEventListener("input", store);
  find("settings-form").addEventListener("submit", (event) => event.preventDefault());
  find("api-key").addEventListener("change", () => {
    apiKey.set(find("api-key").value.trim());
    onKey();
  });
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
  sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(NAMES.map((name) => [name, find(name).value]))));
  showValues();
}

function showValues() {
  for (const name of ["temperature", "top_p"]) find(`${name}-value`).value = Number(find(name).value).toFixed(2);
}

function toggle(isOpen) {
  find("settings").hidden = !isOpen;
  find("open-settings").setAttribute("aria-expanded", String(isOpen));
  find(isOpen ? "settings-title" : "open-settings").focus();
}

/** Open the settings at the key, for a server that asks for one. */
export function askForKey() {
  toggle(true);
  find("api-key").focus();
}

/** The request fields these settings stand for. */
export function sampling() {
  const fields = {
    temperature: Number(find("temperature").value),
    top_p: Number(find("top_p").value),
    max_completion_tokens: Math.max(1, Math.round(Number(find("max_tokens").value)) || Number(DEFAULTS.max_tokens)),
  };
  if (find("seed").value !== "") fields.seed = Math.max(0, Math.round(Number(find("seed").value)));
  return fields;
}

/** The system message, or an empty string. */
export const systemMessage = () => find("system").value.trim();
