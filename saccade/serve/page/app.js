// Wires the page together: views, panels, and whether the server is there.

import { aboutServer, isReady, modelNames } from "./api.js";
import { clear, current, forget, openChat, setModel, setUpChat } from "./chat.js";
import { clearComposer, notify, setUpComposer, showBusy, touches } from "./composer.js";
import { find } from "./dom.js";
import { showFleet } from "./fleet.js";
import { setUpHistory, showHistory } from "./history_panel.js";
import { askForKey, setUpKey, showKey } from "./key.js";
import { setUpLightbox } from "./lightbox.js";
import { setUpSettings } from "./settings.js";
import { showStatus } from "./status.js";

const HEALTH_MS = 10_000;

// ------------------------------------------------------------------ views

const VIEWS = ["chat", "status", "fleet"];

function showView() {
  const wanted = VIEWS.find((name) => location.hash === `#${name}` && !find(`tab-${name}`).hidden) ?? "chat";
  for (const name of VIEWS) {
    find(`view-${name}`).hidden = name !== wanted;
    if (name === wanted) find(`tab-${name}`).setAttribute("aria-current", "page");
    else find(`tab-${name}`).removeAttribute("aria-current");
  }
  showStatus(wanted === "status");
  showFleet(wanted === "fleet");
}

/** Offer the view of the fleet if the server is part of one. */
async function offerFleet() {
  const hasFleet = await aboutServer().then((server) => server.has_fleet, () => false);
  find("tab-fleet").hidden = !hasFleet;
  showView();
}

/** Show the conversation that `change` opens, without files that were attached to another one. */
async function switchChat(change) {
  clearComposer();
  location.hash = "#chat";
  await change();
  showHistory();
}

// ------------------------------------------------------------------ server

let hasAsked = false;

async function connect() {
  const ready = await isReady();
  showKey();
  try {
    showModels(await modelNames());
    setHealth(ready ? "ready" : "down", ready ? "ready" : "not ready");
  } catch (error) {
    const isLocked = error.status === 401;
    showName(isLocked ? "" : "not connected");
    setHealth(isLocked ? "locked" : "down", isLocked ? "needs an API key" : "not ready");
    if (isLocked && !hasAsked) {
      hasAsked = true;
      askForKey();
    }
  }
}

/** A name, or a choice of several. The chosen model stays chosen while it is served. */
function showModels(names) {
  const choice = find("model-choice");
  const chosen = names.includes(choice.value) ? choice.value : names[0];
  choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  showName(names.length > 1 ? "" : chosen);
  choice.hidden = names.length < 2;
  setModel(chosen);
}

function showName(name) {
  find("model-name").hidden = !name;
  find("model-name").textContent = name;
  find("model-choice").hidden = true;
}

function setHealth(state, text) {
  find("health-dot").className = `dot ${state}`;
  find("health-text").textContent = `, server ${text}`;
  find("enter-key").hidden = state !== "locked";
}

setUpComposer();
setUpSettings();
setUpLightbox();
setUpKey(connect);
setUpHistory({ current, clear: () => switchChat(forget), openChat: (id) => switchChat(() => openChat(id)) });
setUpChat({ onBusy: showBusy, onProblem: notify, onKept: showHistory });
find("model-choice").addEventListener("change", (event) => setModel(event.target.value));
find("new-chat").addEventListener("click", () => {
  switchChat(clear);
  find("prompt").focus();
});
addEventListener("hashchange", showView);
showView();
offerFleet();
connect();
setInterval(() => document.hidden || connect(), HEALTH_MS);
if (!touches) find("prompt").focus();
