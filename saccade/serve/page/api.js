// Requests to the server this page came from. The key is sent with every one of them.

import { events } from "./sse.js";
import { recall, remember } from "./storage.js";

const KEY = "saccade.api-key";

export const apiKey = {
  get: () => recall(KEY) ?? "",
  set: (value) => remember(KEY, value || null),
};

/** A request that the server refused or that did not reach it. `status` is 0 without an answer. */
export class RequestFailure extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailure("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // the body is not JSON: only the status is known
  }
  return new RequestFailure(message, response.status, response.headers.get("Retry-After"));
}

/** The names of all models served: the base model, then its adapters. */
export async function modelNames() {
  const models = await (await request("v1/models")).json();
  return models.data.map((model) => model.id);
}

/** Whether the server takes requests now. */
export async function isReady() {
  try {
    await request("ready");
    return true;
  } catch {
    return false;
  }
}

/** What the server has recorded of its metrics after a Unix time. */
export async function recordedMetrics(after) {
  return (await request(`metrics/history?after=${after}`)).json();
}

let about = null;

/** What the page has to know of the server: the bytes that a body may have, and whether it is part of a fleet. */
export function aboutServer() {
  about ??= request("page/server.json").then((response) => response.json());
  return about;
}

/** Versions, replicas and decisions of the fleet. */
export async function fleetStatus() {
  return (await request("fleet")).json();
}

/** Stream a chat completion: yields `{text}`, `{usage}` and `{finish}` objects. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestFailure(chunk.error.message, 200);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new RequestFailure("The connection ended before the answer did.");
}
