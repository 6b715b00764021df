// A request as a command or a program. Files are read by name and the key from the environment: neither is in the text.

import { apiKey } from "./api.js";
import { requestBody } from "./request.js";

const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_completion_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "stop",
  "response_format",
]);

/** A file that the command reads. */
class FileReference {
  constructor({ name, blob }) {
    Object.assign(this, { name, type: blob.type.replace(/[^\w.+/-]/g, "") });
  }
}

const bodyOf = (messages, settings) => requestBody(messages, settings, (media) => new FileReference(media));
const address = (path) => new URL(path, document.baseURI).href;
const shellQuote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A literal in a language whose objects and lists look like JSON's. The writer knows its strings, its words and how
 *  it reads a file. */
function literal(value, writer, indent = "") {
  const inner = `${indent}  `;
  if (value instanceof FileReference) return writer.file(value);
  if (typeof value === "string") return writer.string(value);
  if (value === null || typeof value !== "object") return writer.word(value);
  const isList = Array.isArray(value);
  const entries = isList
    ? value.map((one) => inner + literal(one, writer, inner))
    : Object.entries(value).map(([name, one]) => `${inner}${writer.string(name)}: ${literal(one, writer, inner)}`);
  const [opening, closing] = isList ? "[]" : "{}";
  return entries.length ? `${opening}\n${entries.join(",\n")}\n${indent}${closing}` : opening + closing;
}

// ------------------------------------------------------------------ curl

/** JSON inside a here-document, where the shell reads dollars, backticks and backslashes. */
const CURL = {
  string(text) {
    const escaped = JSON.stringify(text).replace(
      /[$`!]/g,
      (character) => `\\u00${character.charCodeAt(0).toString(16)}`,
    );
    return escaped.replaceAll("\\", "\\\\");
  },
  word: JSON.stringify,
  file: ({ name, type }) => `"data:${type};base64,$(base64 < ${shellQuote(name)} | tr -d '\\n')"`,
};

/** A shell command that sends the request. */
export function asCurl(messages, settings) {
  const key = apiKey.get() ? `  -H "Authorization: Bearer $SACCADE_API_KEY" \\\n` : "";
  return [
    `curl -sS ${shellQuote(address("v1/chat/completions"))} \\\n${key}  -H 'Content-Type: application/json' -d @- <<JSON`,
    literal(bodyOf(messages, settings), CURL),
    "JSON\n",
  ].join("\n");
}

// ------------------------------------------------------------------ Python

const PYTHON = {
  string: JSON.stringify,
  word: (value) => ({ true: "True", false: "False", null: "None" })[value] ?? JSON.stringify(value),
  file: ({ name, type }) => `data_url(${JSON.stringify(name)}, ${JSON.stringify(type)})`,
};
const DATA_URL = `
def data_url(path, media_type):
    return f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"

`;

/** A program that sends the request with OpenAI's client. */
export function asPython(messages, settings) {
  const fields = Object.entries(bodyOf(messages, settings));
  const others = fields.filter(([name]) => !OPENAI_FIELDS.has(name));
  const known = fields.filter(([name]) => OPENAI_FIELDS.has(name));
  if (others.length) known.push(["extra_body", Object.fromEntries(others)]);
  const hasFiles = messages.some(({ media }) => media?.length);
  const hasKey = Boolean(apiKey.get());
  const imports = [
    ...(hasFiles ? ["import base64"] : []),
    ...(hasKey ? ["import os"] : []),
    ...(hasFiles ? ["from pathlib import Path"] : []),
  ];
  return [
    ...imports,
    ...(imports.length ? [""] : []),
    "from openai import OpenAI",
    "",
    ...(hasFiles ? [DATA_URL] : []),
    `client = OpenAI(base_url=${JSON.stringify(address("v1"))}, api_key=${hasKey ? 'os.environ["SACCADE_API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(",
    ...known.map(([name, value]) => `    ${name}=${literal(value, PYTHON, "    ")},`),
    ")",
    "print(answer.choices[0].message.content)",
    "",
  ].join("\n");
}
