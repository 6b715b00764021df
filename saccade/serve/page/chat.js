// The conversation: its messages, how they are shown, sent and stored.

import { aboutServer, streamChat } from "./api.js";
import { announce, find } from "./dom.js";
import { Figures } from "./figures.js";
import * as history from "./history.js";
import { askForKey } from "./key.js";
import { randomId } from "./media.js";
import { AnswerView, showQuestion } from "./message_view.js";
import { dataUrls, requestBody } from "./request.js";
import { requestSettings, SettingProblem, showField } from "./settings.js";
import { recall, remember } from "./storage.js";

const OPEN = "saccade.conversation";
const KEEP_MS = 1000;
const LEFT = "The page was left before the answer ended.";

let conversation = fresh();
let model = null;
let running = null;
let maxBytes = Infinity;
let report = { onBusy: () => {}, onProblem: () => {}, onKept: () => {} };

function fresh() {
  return { id: randomId(), created: Date.now(), messages: [], isDeleted: false };
}

/** Set what the conversation reports to (`onBusy(isBusy)`, `onProblem(sentence)`, `onKept()`) and show the one that
 *  this tab had open. */
export async function setUpChat(given) {
  report = given;
  aboutServer().then(
    (server) => {
      maxBytes = server.max_body_bytes;
    },
    () => {},
  );
  const found = recall(OPEN) && (await history.load(recall(OPEN)));
  if (found && !conversation.messages.length) show(found); // unless a question came first
}

export const setModel = (name) => {
  model = name;
};
export const isBusy = () => running !== null;
export const current = () => conversation;

/** Stop the answer in progress; the text so far stays. */
export function stop() {
  running?.abort();
}

/** Begin a new conversation. */
export function clear() {
  replace(fresh());
  remember(OPEN, null);
}

/** Begin a new conversation and never save the old one again. */
export function forget() {
  conversation.isDeleted = true;
  clear();
}

/** Show a kept conversation. */
export async function openChat(id) {
  const found = await history.load(id);
  if (found) show(found);
}

function show(found) {
  replace({ ...found, isDeleted: false });
  remember(OPEN, found.id);
  for (const message of conversation.messages) {
    if (message.role === "user") showMessage(message);
    else showAnswer(message).end();
  }
}

function replace(next) {
  stop();
  for (const { media } of conversation.messages) for (const one of media) one.release();
  conversation = next;
  find("messages").replaceChildren();
  find("welcome").hidden = next.messages.length > 0;
}

/** Ask: add a question and stream its answer; false if it cannot be sent as it is. */
export function ask(text, media) {
  const settings = checkedSettings();
  if (!settings || !fits([...conversation.messages, { text, media }])) return false;
  find("welcome").hidden = true;
  const message = { role: "user", text, media };
  conversation.messages.push(message);
  showMessage(message);
  answer(settings);
  return true;
}

/** Change the last question instead of asking a new one. */
export function editLast() {
  conversation.messages.findLast((message) => message.role === "user")?.edit();
}

/** The settings of a request, or null if one of them cannot be sent: the reader sees which. */
function checkedSettings() {
  try {
    return requestSettings(model);
  } catch (error) {
    if (!(error instanceof SettingProblem)) throw error;
    report.onProblem(error.message);
    showField(error.field);
    return null;
  }
}

function fits(messages) {
  const bytes = messages.flatMap(({ media }) => media).reduce((sum, { sentBytes }) => sum + sentBytes, 0);
  if (bytes < maxBytes) return true;
  const size = (number) => `${(number / 2 ** 20).toFixed(1)} MiB`;
  report.onProblem(
    `The images and videos of this chat take ${size(bytes)} in a request; the server takes ${size(maxBytes)}. Remove some of them or start a new chat.`,
  );
  return false;
}

// ------------------------------------------------------------------ messages

function showMessage(message) {
  showQuestion(message, (text) => {
    if (!checkedSettings()) return;
    cutFrom(message);
    ask(text, message.media);
  });
  scrollToEnd(true);
}

function showAnswer(message) {
  const view = new AnswerView(message, {
    before: () => conversation.messages.slice(0, conversation.messages.indexOf(message)),
    again: () => answerAgain(message),
    onGrown: () => scrollToEnd(false),
  });
  scrollToEnd(true);
  return view;
}

function answerAgain(message) {
  const settings = checkedSettings();
  if (!settings) return;
  cutFrom(message);
  answer(settings);
}

/** Remove a message and all that follow. */
function cutFrom(message) {
  stop();
  for (const removed of conversation.messages.splice(conversation.messages.indexOf(message))) removed.node.remove();
}

/** Follow the answer, unless the reader has scrolled up. */
function scrollToEnd(always) {
  const box = find("scroll");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

// ------------------------------------------------------------------ answers

async function answer(settings) {
  const owner = conversation;
  const said = [...owner.messages];
  const message = { role: "assistant", text: "", media: [], settings, note: LEFT, failure: "", figures: "" };
  owner.messages.push(message);
  const view = showAnswer(message);
  const controller = (running = new AbortController());
  report.onBusy(true);
  announce("Answering");
  keep(owner);
  let failure = null;
  try {
    message.note = await receive(
      message,
      view,
      requestBody(said, settings, await dataUrls(said)),
      controller.signal,
      () => keepSoon(owner),
    );
    announce(message.text);
  } catch (error) {
    message.note = error.name === "AbortError" ? "Stopped." : "";
    failure = error.name === "AbortError" ? null : error;
  }
  if (failure) fail(message, failure);
  view.end();
  if (running === controller) {
    running = null;
    report.onBusy(false);
  }
  keep(owner);
  if (failure?.status === 401 && (await askForKey()) && owner === conversation && owner.messages.at(-1) === message)
    answerAgain(message);
}

/** Stream the answer into its message; returns the note to show under it. */
async function receive(message, view, body, signal, onText) {
  const figures = new Figures();
  let finish = null;
  for await (const part of streamChat(body, signal)) {
    if (part.usage) figures.usage = part.usage;
    if (part.finish) finish = part.finish;
    if (part.text) {
      figures.addText();
      message.text += part.text;
      onText();
    }
    message.figures = figures.line();
    view.grow();
  }
  return finish === "length" ? "The answer reached the maximum number of tokens." : "";
}

function fail(message, error) {
  const wait = error.status === 429 && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  message.failure = error.message + wait;
  announce(`The request failed. ${error.message}`);
}

// ------------------------------------------------------------------ keeping

let waiting = null;

function keepSoon(owner) {
  waiting ??= setTimeout(() => keep(owner), KEEP_MS);
}

async function keep(owner) {
  clearTimeout(waiting);
  waiting = null;
  if (owner.isDeleted) return;
  if (owner === conversation) remember(OPEN, owner.id);
  try {
    await history.save(owner);
  } catch (error) {
    report.onProblem(
      `This conversation could not be saved in the browser (${error.name}). Delete older ones in History, or export it.`,
    );
  }
  report.onKept();
}
