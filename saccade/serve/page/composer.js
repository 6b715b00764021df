// The box for the next question: text, files, send, stop.

import { attachments, clearAttachments, setUpAttachments, takeAttachments } from "./attachments.js";
import { ask, editLast, isBusy, stop } from "./chat.js";
import { find } from "./dom.js";

export const touches = matchMedia("(pointer: coarse)").matches;
const prompt = find("prompt");
let isSending = false;

/** Show a sentence above the box; an empty one removes it. */
export function notify(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

/** Remove attached files and notices. */
export function clearComposer() {
  clearAttachments();
  notify("");
}

/** Show whether an answer is in progress. */
export function showBusy(busy) {
  const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  if (hadFocus) (busy ? find("stop") : prompt).focus();
}

async function send() {
  if (isBusy() || isSending) return;
  isSending = true;
  try {
    const media = await attachments();
    const text = prompt.value.trim();
    if (!text && !media.length) return;
    notify("");
    if (!ask(text, media)) return;
    takeAttachments();
    write("");
  } finally {
    isSending = false;
  }
}

/** Replace the text; the box grows with it. */
function write(text) {
  prompt.value = text;
  grow();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

export function setUpComposer() {
  setUpAttachments(notify);
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches) {
      event.preventDefault();
      send();
    }
    if (event.key === "ArrowUp" && prompt.value === "" && !isBusy()) {
      event.preventDefault();
      editLast();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isBusy() && !document.querySelector("dialog[open]")) stop();
  });
  find("stop").addEventListener("click", stop);
  for (const chip of document.querySelectorAll("[data-example]")) {
    chip.addEventListener("click", () => {
      write(chip.dataset.example);
      prompt.focus();
    });
  }
}
