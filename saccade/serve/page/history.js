// Conversations kept in this browser, in IndexedDB: texts in one store, images and videos in another. The key is never
// part of them. If the browser has no storage, nothing is kept and the page still works.

import { Media } from "./media.js";
import { dataUrls, turn } from "./request.js";

const KEPT = "saccade.keep-history";
const MAX_TITLE = 60;
const SAVED_FIELDS = ["role", "text", "settings", "note", "failure", "figures"];

let opening = null;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function open() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("saccade", 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("media", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
    request.onblocked = () => resolve(null);
  });
}

async function stores(mode) {
  opening ??= open();
  const database = await opening;
  if (!database) return null;
  const transaction = database.transaction(["conversations", "media"], mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  ended.catch(() => {}); // callers that await it see the error
  return { conversations: transaction.objectStore("conversations"), media: transaction.objectStore("media"), ended };
}

/** Whether the browser lets this page store conversations. */
export async function canKeep() {
  return (await stores("readonly")) !== null;
}

/** Whether the reader wants conversations to be kept. */
export function isKept() {
  try {
    return localStorage.getItem(KEPT) !== "no";
  } catch {
    return true;
  }
}

export function setKept(isWanted) {
  try {
    if (isWanted) localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, "no");
  } catch {
    // without storage nothing is kept
  }
}

/** The title of a conversation: its first words. */
export function titleOf({ messages }) {
  const first = messages.find(({ role }) => role === "user");
  const text = first?.text.trim().replace(/\s+/g, " ") || first?.media[0]?.name || "Empty chat";
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1)}…` : text;
}

/** Ids, titles and times of all conversations, the latest first. */
export async function list() {
  const opened = await stores("readonly");
  const found = opened ? await settled(opened.conversations.getAll()) : [];
  return found.map(({ id, title, updated }) => ({ id, title, updated })).sort((a, b) => b.updated - a.updated);
}

/** The conversation as it was saved, or null. */
export async function load(id) {
  const opened = await stores("readonly");
  if (!opened) return null;
  const [saved, files] = await Promise.all([
    settled(opened.conversations.get(id)),
    settled(opened.media.index("conversation").getAll(id)),
  ]);
  if (!saved) return null;
  const media = new Map(files.map((file) => [file.id, new Media(file)]));
  const messages = saved.messages.map((message) => ({
    ...message,
    media: message.media.map((one) => media.get(one)).filter(Boolean),
  }));
  return { id, created: saved.created, messages };
}

/** Save a conversation as it is now. Images and videos are written once, and removed when no message has them any
 *  more. */
export async function save({ id, created, messages }) {
  const record = {
    id,
    created,
    updated: Date.now(),
    title: titleOf({ messages }),
    messages: messages.map((message) => ({
      ...Object.fromEntries(
        SAVED_FIELDS.filter((name) => message[name] !== undefined).map((name) => [name, message[name]]),
      ),
      media: message.media.map((one) => one.id),
    })),
  };
  const files = messages
    .flatMap(({ media }) => media)
    .map(({ id: mediaId, name, blob }) => ({ id: mediaId, conversation: id, name, blob }));
  const opened = isKept() ? await stores("readwrite") : null;
  if (!opened) return;
  opened.conversations.put(record);
  const stored = new Set(await settled(opened.media.index("conversation").getAllKeys(id)));
  for (const file of files) if (!stored.delete(file.id)) opened.media.put(file);
  for (const unused of stored) opened.media.delete(unused);
  await opened.ended;
}

/** Delete a conversation with its images and videos. */
export async function remove(id) {
  const opened = await stores("readwrite");
  if (!opened) return;
  opened.conversations.delete(id);
  for (const key of await settled(opened.media.index("conversation").getAllKeys(id))) opened.media.delete(key);
  await opened.ended;
}

/** Delete everything. */
export async function removeAll() {
  const opened = await stores("readwrite");
  if (!opened) return;
  opened.conversations.clear();
  opened.media.clear();
  await opened.ended;
}

/** Conversations as a JSON file: messages in OpenAI's form with their images and videos, and the settings of each
 *  answer. */
export async function exported(conversations) {
  const written = [];
  for (const { id, created, messages } of conversations) {
    const urlOf = await dataUrls(messages);
    written.push({
      id,
      title: titleOf({ messages }),
      created: new Date(created).toISOString(),
      messages: messages.map((message) => ({
        ...turn(message, urlOf),
        ...(message.settings ? { settings: message.settings } : {}),
      })),
    });
  }
  const content = { format: "saccade-conversations", version: 1, conversations: written };
  return new Blob([JSON.stringify(content, null, 1)], { type: "application/json" });
}
