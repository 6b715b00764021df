// The conversation: what was said, shown and sent.

import { streamChat } from "./api.js";
import { announce, button, element, find } from "./dom.js";
import { askForKey, sampling, systemMessage } from "./settings.js";

const messages = [];
let model = null;
let running = null;
let onBusy = () => {};

/** Set what the conversation reports to: `listener(isBusy)`. */
export function setUpChat(listener) {
  onBusy = listener;
}

export const setModel = (name) => { model = name; };
export const isBusy = () => running !== null;

/** Stop the answer in progress; what has come of it stays. */
export function stop() {
  running?.abort();
}

/** Forget the conversation. */
export function clear() {
  stop();
  messages.length = 0;
  find("messages").replaceChildren();
  find("welcome").hidden = false;
}

/** Ask: add a question and stream its answer. */
export function ask(text, images) {
  find("welcome").hidden = true;
  show({ role: "user", text, images });
  return answer();
}

/** Change the last question instead of asking a new one. */
export function editLast() {
  messages.findLast((message) => message.role === "user")?.edit();
}

function show(message) {
  messages.push(message);
  message.node = element("li", { class: `message ${message.role}` });
  find("messages").append(message.node);
  if (message.role === "user") renderQuestion(message);
  scrollToEnd(true);
  return message;
}

/** Remove a message and all that follow. */
function cutFrom(message) {
  stop();
  for (const removed of messages.splice(messages.indexOf(message))) removed.node.remove();
}

// ------------------------------------------------------------------ questions

function renderQuestion(message) {
  const pictures = message.images.map((image) => element("li", {}, element("img", { src: image.url, alt: image.name })));
  message.edit = () => renderEditor(message);
  message.node.replaceChildren(
    element("span", { class: "unseen" }, "You:"),
    ...(pictures.length ? [element("ul", { class: "pictures", "aria-label": "Images" }, ...pictures)] : []),
    element("div", { class: "said" }, button("Edit", message.edit), message.text ? element("div", { class: "text" }, message.text) : null),
  );
}

function renderEditor(message) {
  const area = element("textarea", { "aria-label": "Edit your question", rows: 3 });
  area.value = message.text;
  const cancel = () => renderQuestion(message);
  const resend = () => {
    cutFrom(message);
    ask(area.value.trim(), message.images);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      resend();
    }
  });
  const actions = element("div", {}, button("Cancel", cancel), button("Resend", resend, { class: "primary" }));
  message.node.replaceChildren(element("div", { class: "edit" }, area, actions));
  area.focus();
}

// ------------------------------------------------------------------ answers

async function answer() {
  const sent = body();
  const message = show({ role: "assistant", text: "", images: [] });
  const view = renderAnswer(message);
  const controller = (running = new AbortController());
  const figures = new Figures();
  onBusy(true);
  announce("Answering");
  try {
    for await (const part of streamChat(sent, controller.signal)) {
      if (part.text) {
        figures.addText();
        message.text += part.text;
        view.append(part.text, figures);
      }
      if (part.usage) figures.usage = part.usage;
      if (part.finish) view.finish = part.finish;
    }
    view.end(figures, view.finish === "length" ? "The answer reached the maximum number of tokens." : "");
    announce(message.text);
  } catch (error) {
    if (error.name === "AbortError") view.end(figures, "Stopped.");
    else fail(view, figures, error);
  } finally {
    if (running === controller) {
      running = null;
      onBusy(false);
    }
  }
}

function fail(view, figures, error) {
  const wait = error.status === 429 && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  view.end(figures, "", error.message + wait);
  announce(`The request failed. ${error.message}`);
  if (error.status === 401) askForKey();
}

/** The request: what has been said so far. */
function body() {
  const system = systemMessage();
  const turns = messages.filter((message) => message.text || message.images.length).map(turn);
  return { model, messages: system ? [{ role: "system", content: system }, ...turns] : turns, ...sampling() };
}

function turn({ role, text, images }) {
  if (!images.length) return { role, content: text };
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

function renderAnswer(message) {
  const text = document.createTextNode("");
  const figuresNode = element("span", { class: "figures" });
  const meta = element("div", { class: "meta" }, figuresNode);
  message.node.replaceChildren(element("span", { class: "unseen" }, "Answer:"), element("div", { class: "text" }, text), meta);
  message.node.classList.add("busy");
  message.node.setAttribute("aria-busy", "true");
  return {
    finish: null,
    append(more, figures) {
      text.appendData(more);
      figuresNode.textContent = figures.line();
      scrollToEnd(false);
    },
    end(figures, note, failure = "") {
      message.node.classList.remove("busy");
      message.node.removeAttribute("aria-busy");
      figuresNode.textContent = figures.line();
      if (note) meta.before(element("p", { class: "ended" }, note));
      if (failure) meta.before(element("p", { class: "failure" }, failure));
      meta.append(...actionsOf(message));
      scrollToEnd(false);
    },
  };
}

function actionsOf(message) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(message.text);
    announce("Copied");
  });
  const again = button("Answer again", () => {
    cutFrom(message);
    answer();
  });
  return message.text && navigator.clipboard ? [copy, again] : [again];
}

/** Time to first token and tokens per second of one answer. While it streams, an event counts as one token. */
class Figures {
  usage = null;
  #started = performance.now();
  #first = null;
  #last = null;
  #events = 0;

  addText() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#events += 1;
  }

  line() {
    if (this.#first === null) return "";
    const tokens = this.usage?.completion_tokens ?? this.#events;
    const seconds = (this.#last - this.#first) / 1000;
    const parts = [`first token ${duration(this.#first - this.#started)}`, `${tokens} tokens`];
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    return parts.join(" · ");
  }
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** Follow the answer, unless the reader has scrolled up. */
function scrollToEnd(always) {
  const box = find("scroll");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}
