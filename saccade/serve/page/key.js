// The API key: asked for when the server wants one, kept in the tab.

import { apiKey, modelNames } from "./api.js";
import { find } from "./dom.js";

const PRINTABLE = /^[!-~]+$/; // characters that a header may contain

let asking = null;
let onChange = () => {};

/** Ask for a key until the server takes it or the reader gives up; whether it was taken. There is one dialog at a time.
 *  `isNeeded`: the server has refused a request. */
export function askForKey(isNeeded = true) {
  asking ??= new Promise((resolve) => {
    const dialog = find("key-dialog");
    find("key-title").textContent = isNeeded ? "This server needs an API key" : "API key of this server";
    find("api-key").value = "";
    find("key-problem").textContent = isNeeded && apiKey.get() ? "The server refuses the key that this tab has." : "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        resolve(dialog.returnValue === "accepted");
      },
      { once: true },
    );
    dialog.showModal();
    find("api-key").focus();
  });
  return asking;
}

async function tryKey(key) {
  const before = apiKey.get();
  apiKey.set(key);
  if (PRINTABLE.test(key) && !(await isRefused())) {
    find("api-key").value = "";
    find("key-dialog").close("accepted");
    onChange();
    return;
  }
  apiKey.set(before);
  find("key-problem").textContent = "The server refuses this key.";
  find("api-key").select();
}

async function isRefused() {
  try {
    await modelNames();
    return false;
  } catch (error) {
    return error.status === 401;
  }
}

/** Listen to the dialog and to the buttons that change and forget the key; `listener` is called when it has changed. */
export function setUpKey(listener) {
  onChange = listener;
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = find("api-key").value.trim();
    if (key) tryKey(key);
  });
  find("cancel-key").addEventListener("click", () => find("key-dialog").close(""));
  find("enter-key").addEventListener("click", () => askForKey());
  find("change-key").addEventListener("click", () => askForKey(false));
  find("forget-key").addEventListener("click", () => {
    apiKey.set("");
    onChange();
  });
}

/** Say in the settings whether this tab has a key. */
export function showKey() {
  const hasKey = Boolean(apiKey.get());
  find("key-state").textContent = hasKey
    ? "This tab has a key. It is forgotten when the tab is closed."
    : "This tab has no key.";
  find("change-key").textContent = hasKey ? "Change key" : "Enter key";
  find("forget-key").hidden = !hasKey;
}
