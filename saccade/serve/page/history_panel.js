// The list of kept conversations: open, export, delete.

import { download } from "./clipboard.js";
import { announce, button, element, find } from "./dom.js";
import * as history from "./history.js";

let chat = null;

/** `chat` has the open conversation: `current()`, `openChat(id)`, `clear()`. */
export function setUpHistory(given) {
  chat = given;
  find("open-history").addEventListener("click", () => toggle(find("history").hidden));
  find("close-history").addEventListener("click", () => toggle(false));
  find("history").addEventListener("keydown", (event) => {
    if (event.key === "Escape") toggle(false);
  });
  find("keep-history").checked = history.isKept();
  find("keep-history").addEventListener("change", (event) => history.setKept(event.target.checked));
  find("export-chat").addEventListener("click", () => exportAll([chat.current()], "chat"));
  find("export-history").addEventListener("click", exportEverything);
  find("delete-history").addEventListener("click", deleteEverything);
}

function toggle(isOpen) {
  find("history").hidden = !isOpen;
  find("open-history").setAttribute("aria-expanded", String(isOpen));
  find(isOpen ? "history-title" : "open-history").focus();
  if (isOpen) showHistory();
}

/** Read the list again, if it is open. */
export async function showHistory() {
  if (find("history").hidden) return;
  const [entries, canKeep] = [await history.list(), await history.canKeep()];
  find("history-note").textContent = !canKeep
    ? "This browser does not let the page store conversations: they last until the page is closed."
    : entries.length
      ? ""
      : "No conversations yet.";
  find("conversations").replaceChildren(...entries.map(entry));
  for (const id of ["export-history", "delete-history"]) find(id).disabled = entries.length === 0;
  find("export-chat").disabled = chat.current().messages.length === 0;
  find("keep-history").disabled = !canKeep;
}

function entry({ id, title, updated }) {
  const when = new Date(updated);
  const isCurrent = id === chat.current().id;
  const open = async () => {
    if (matchMedia("(max-width: 46rem)").matches) toggle(false);
    await chat.openChat(id);
    await showHistory();
  };
  const label = [
    element("span", { class: "title" }, title),
    element("time", { datetime: when.toISOString() }, when.toLocaleString()),
  ];
  return element(
    "li",
    {},
    element(
      "button",
      { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, click: open },
      ...label,
    ),
    button("Export", () => exportOne(id), { "aria-label": `Export ${title}` }),
    button("Delete", () => deleteOne(id, title), { "aria-label": `Delete ${title}` }),
  );
}

// ------------------------------------------------------------------ export and delete

async function exportAll(conversations, name) {
  download(`saccade-${name}.json`, await history.exported(conversations.filter(Boolean)));
  announce("Exported");
}

async function exportOne(id) {
  await exportAll([await history.load(id)], "chat");
}

async function exportEverything() {
  const entries = await history.list();
  await exportAll(await Promise.all(entries.map(({ id }) => history.load(id))), "history");
}

async function deleteOne(id, title) {
  if (!confirm(`Delete the conversation "${title}" from this browser?`)) return;
  if (id === chat.current().id) chat.clear();
  await history.remove(id);
  await showHistory();
  find("history-title").focus();
}

async function deleteEverything() {
  if (!confirm("Delete all conversations from this browser?")) return;
  chat.clear();
  await history.removeAll();
  await showHistory();
  find("history-title").focus();
}
