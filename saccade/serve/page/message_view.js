// How questions and answers look.

import { preview } from "./attachments.js";
import { copyButton } from "./clipboard.js";
import { button, element, find } from "./dom.js";
import { indentJson } from "./json.js";
import { codeBlock, MarkdownView } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";

function place(message) {
  message.node = element("li", { class: `message ${message.role}` });
  find("messages").append(message.node);
}

// ------------------------------------------------------------------ questions

/** Show a question; `onEdited(text)` is called when it is sent again. */
export function showQuestion(message, onEdited) {
  place(message);
  renderQuestion(message, onEdited);
}

function renderQuestion(message, onEdited) {
  const files = message.media.map((media) => element("li", {}, preview(media)));
  message.edit = () => renderEditor(message, onEdited);
  message.node.replaceChildren(
    element("span", { class: "unseen" }, "You:"),
    ...(files.length ? [element("ul", { class: "pictures", "aria-label": "Images and videos" }, ...files)] : []),
    element(
      "div",
      { class: "said" },
      button("Edit", message.edit),
      message.text ? element("div", { class: "text" }, message.text) : null,
    ),
  );
}

function renderEditor(message, onEdited) {
  const area = element("textarea", { "aria-label": "Edit your question", rows: 3 });
  area.value = message.text;
  const cancel = () => renderQuestion(message, onEdited);
  const resend = () => onEdited(area.value.trim());
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

/** An answer while it grows and when it has ended. */
export class AnswerView {
  #message;
  #actions;
  #text = element("div", { class: "text markdown" });
  #figures = element("span", { class: "figures" });
  #meta = element("div", { class: "meta" }, this.#figures);
  #markdown = new MarkdownView(this.#text);
  #frame = null;

  /** `actions`: `before()` returns the messages before it, `again()` answers again, `onGrown()` is called when it
   *  has grown. */
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    place(message);
    message.node.append(element("span", { class: "unseen" }, "Answer:"), this.#text, this.#meta);
    message.node.classList.add("busy");
    message.node.setAttribute("aria-busy", "true");
  }

  /** Show what the message has now, in the next frame. */
  grow() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#render();
    });
  }

  /** Show all of it, and what can be done with it. */
  end() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const { node, note, failure } = this.#message;
    node.classList.remove("busy");
    node.removeAttribute("aria-busy");
    if (note) this.#meta.before(element("p", { class: "ended" }, note));
    if (failure) this.#meta.before(element("p", { class: "failure" }, failure));
    this.#meta.append(...this.#buttons());
    this.#render();
  }

  #render() {
    const { text, settings, figures } = this.#message;
    const isJson = settings?.sampling.response_format && /^\s*[{[]/.test(text);
    if (isJson) this.#text.replaceChildren(codeBlock(indentJson(text), "json"));
    else this.#markdown.update(text);
    this.#figures.textContent = figures;
    this.#actions.onGrown();
  }

  #buttons() {
    const { text, settings } = this.#message;
    const { before, again } = this.#actions;
    return [
      text ? copyButton("Copy", () => text) : null,
      button("Answer again", again),
      copyButton("Copy as curl", () => asCurl(before(), settings)),
      copyButton("Copy as Python", () => asPython(before(), settings)),
    ].filter(Boolean);
  }
}
