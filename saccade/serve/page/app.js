// Wires the page together: views, the composer, and whether the server is there.

import { isReady, modelNames } from "./api.js";
import { ask, clear, editLast, isBusy, setModel, setUpChat, stop } from "./chat.js";
import { find } from "./dom.js";
import { setUpImages, takeImages } from "./images.js";
import { askForKey, setUpSettings } from "./settings.js";
import { showStatus } from "./status.js";

const HEALTH_MS = 10_000;
const touches = matchMedia("(pointer: coarse)").matches;
const prompt = find("prompt");

// ------------------------------------------------------------------ views

function showView() {
  const isStatus = location.hash === "#status";
  find("view-chat").hidden = isStatus;
  find("view-status").hidden = !isStatus;
  for (const [tab, isCurrent] of [[find("tab-chat"), !isStatus], [find("tab-status"), isStatus]]) {
    if (isCurrent) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  showStatus(isStatus);
}

// ------------------------------------------------------------------ composer

function notify(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

function send() {
  const text = prompt.value.trim();
  if (isBusy()) return;
  const images = takeImages();
  if (!text && !images.length) return;
  notify("");
  prompt.value = "";
  grow();
  ask(text, images);
}

/** Let the text box be as high as its text. */
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function setUpComposer() {
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
    if (event.key === "Escape" && isBusy()) stop();
  });
  find("stop").addEventListener("click", stop);
  find("model-choice").addEventListener("change", (event) => setModel(event.target.value));
  find("new-chat").addEventListener("click", () => {
    clear();
    location.hash = "#chat";
    prompt.focus();
  });
  for (const chip of document.querySelectorAll("[data-example]")) {
    chip.addEventListener("click", () => {
      prompt.value = chip.dataset.example;
      grow();
      prompt.focus();
    });
  }
}

function showBusy(busy) {
  const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  if (hadFocus) (busy ? find("stop") : prompt).focus();
}

// ------------------------------------------------------------------ server

async function connect() {
  const ready = await isReady();
  setHealth(ready ? "ready" : "down", ready ? "ready" : "not ready");
  try {
    showModels(await modelNames());
  } catch (error) {
    find("model-name").textContent = error.status === 401 ? "needs an API key" : "not connected";
    if (error.status === 401 && find("settings").hidden && !connect.hasAsked) {
      connect.hasAsked = true;
      askForKey();
    }
  }
}

/** A name, or a choice of several. What was chosen stays chosen while it is served. */
function showModels(names) {
  const choice = find("model-choice");
  const chosen = names.includes(choice.value) ? choice.value : names[0];
  choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  choice.hidden = names.length < 2;
  find("model-name").hidden = names.length > 1;
  find("model-name").textContent = chosen;
  setModel(chosen);
}

function setHealth(state, text) {
  find("health-dot").className = `dot ${state}`;
  find("health-text").textContent = `, server ${text}`;
}

setUpChat(showBusy);
setUpImages(notify);
setUpComposer();
setUpSettings(connect);
addEventListener("hashchange", showView);
showView();
connect();
setInterval(() => document.hidden || connect(), HEALTH_MS);
if (!touches) prompt.focus();
