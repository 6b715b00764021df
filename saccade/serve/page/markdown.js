// Markdown to DOM nodes: blocks here, what is inside them in inline.js. Line breaks are kept, since models read text
// line by line.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { inline } from "./inline.js";
import { maths } from "./tex.js";

const FENCE = /^ *(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITER_ROW = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const DISPLAY = [
  ["$$", "$$"],
  ["\\[", "\\]"],
];
const ENVIRONMENT = /^ *\\begin\{((?:align|gather|equation|multline)\*?)\}/;
const TASK = /^\[([ xX])\] /;
const MAX_DEPTH = 12;
const MAX_FORMULA_LINES = 100;
const FIRST_HEADING = 3; // the page and the view use the first two levels

/** Markdown that grows: blocks whose source has not changed keep their nodes. */
export class MarkdownView {
  #container;
  #shown = [];

  constructor(container) {
    this.#container = container;
  }

  update(text) {
    const blocks = parseBlocks(linesOf(text));
    let same = 0;
    while (same < blocks.length && this.#shown[same]?.source === blocks[same].source) same += 1;
    for (const { node } of this.#shown.splice(same)) node.remove();
    for (const { source, render } of blocks.slice(same)) {
      const node = render();
      this.#container.append(node);
      this.#shown.push({ source, node });
    }
  }
}

/** A block of code with a button that copies it. */
export function codeBlock(code, language) {
  const head = element(
    "div",
    { class: "code-head" },
    element("span", {}, language || "code"),
    copyButton("Copy code", () => code),
  );
  return element(
    "div",
    { class: "code" },
    head,
    element("pre", { tabindex: 0, role: "region", "aria-label": "Code" }, element("code", {}, code)),
  );
}

function linesOf(text) {
  return text
    .replace(/\r\n?/g, "\n")
    .split("\n")
    .map((line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")));
}

/** Blocks in order: their source, and how to make their node. */
function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const { end, render } = (depth < MAX_DEPTH && special(lines, at, depth)) || paragraph(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), render });
    at = end;
  }
  return blocks;
}

const renderAll = (lines, depth) => parseBlocks(lines, depth).map(({ render }) => render());

/** The block that begins at a line, or null for a paragraph. */
function special(lines, at, depth) {
  return (
    fence(lines, at) ??
    heading(lines, at) ??
    rule(lines, at) ??
    quote(lines, at, depth) ??
    list(lines, at, depth) ??
    table(lines, at) ??
    display(lines, at)
  );
}

/** Whether a line ends the paragraph before it. */
function interrupts(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && line.trim() !== item[2] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1)) return true;
  return table(lines, at) !== null || display(lines, at) !== null;
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && (depth < MAX_DEPTH ? !interrupts(lines, end) : lines[end].trim())) end += 1;
  return {
    end,
    render: () =>
      element(
        "p",
        {},
        inline(
          lines
            .slice(at, end)
            .map((line) => line.trimStart())
            .join("\n")
            .trimEnd(),
        ),
      ),
  };
}

function fence(lines, at) {
  const opening = FENCE.exec(lines[at]);
  if (!opening) return null;
  const [, mark, language] = opening;
  const indent = lines[at].search(/\S/);
  const isClosing = (line) => line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end])) end += 1;
  const code = lines
    .slice(at + 1, end)
    .map((line) => dedent(line, indent))
    .join("\n");
  return { end: Math.min(end + 1, lines.length), render: () => codeBlock(code, language.trim().split(" ")[0]) };
}

const dedent = (line, indent) => line.slice(Math.min(indent, line.length - line.trimStart().length));

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const level = Math.min(6, found[1].length + FIRST_HEADING - 1);
  const content = lines[at].trim().slice(found[1].length).trim();
  const closing = content.length - content.replace(/#{1,100}$/, "").length;
  const text = closing && /^ ?$/.test(content.at(-closing - 1) ?? "") ? content.slice(0, -closing).trimEnd() : content;
  return { end: at + 1, render: () => element(`h${level}`, {}, inline(text)) };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { end: at + 1, render: () => element("hr") } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, render: () => element("blockquote", {}, ...renderAll(inner, depth + 1)) };
}

// ------------------------------------------------------------------ lists

const isOrdered = (item) => /\d/.test(item[2]);

/** Items of one kind. What is indented by two spaces or more belongs to the item before it, as models write it. */
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || isOrdered(item) !== isOrdered(first) || RULE.test(lines[end])) break;
    const after = endOfItem(lines, end, item);
    items.push(itemLines(lines.slice(end, after), item));
    end = after;
    while (end < lines.length && !lines[end].trim()) end += 1;
  }
  if (!items.length) return null;
  while (!lines[end - 1].trim()) end -= 1;
  const tag = isOrdered(first) ? "ol" : "ul";
  const start = isOrdered(first) ? parseInt(first[2], 10) : 1;
  return {
    end,
    render: () => element(tag, { start: start === 1 ? null : start }, ...items.map((one) => listItem(one, depth))),
  };
}

function endOfItem(lines, at, item) {
  const isInside = (line) => line.search(/\S/) >= item[1].length + 2;
  let end = at + 1;
  while (end < lines.length) {
    let filled = end;
    while (filled < lines.length && !lines[filled].trim()) filled += 1;
    if (filled === lines.length) break;
    const isLazy = filled === end && !ITEM.test(lines[end]) && !interrupts(lines, end);
    if (!isLazy && !isInside(lines[filled])) break;
    end = filled + 1;
  }
  return end;
}

function itemLines(lines, item) {
  const width = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
  return [lines[0].slice(width), ...lines.slice(1).map((line) => dedent(line, width))];
}

function listItem(lines, depth) {
  const task = TASK.exec(lines[0]);
  const text = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const nodes = renderAll(text, depth + 1);
  const content = nodes.flatMap((node, index) => (index === 0 && node.tagName === "P" ? [...node.childNodes] : [node]));
  const mark =
    task &&
    element(
      "span",
      { class: "task", role: "img", "aria-label": task[1] === " " ? "to do" : "done" },
      task[1] === " " ? "☐" : "☑",
    );
  return element("li", { class: task ? "task-item" : null }, mark, ...content);
}

// ------------------------------------------------------------------ tables

function table(lines, at) {
  if (!lines[at].includes("|") || !DELIMITER_ROW.test(lines[at + 1] ?? "") || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]);
  const alignments = cells(lines[at + 1]).map(alignment);
  if (head.length !== alignments.length) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map(cells);
  return { end, render: () => renderTable(head, alignments, rows) };
}

/** Cells of a row, split at bars that are not escaped. */
function cells(line) {
  const parts = [""];
  for (const piece of line.trim().match(/\\.|[^\\]|\\$/gu) ?? []) {
    if (piece === "|") parts.push("");
    else parts[parts.length - 1] += piece === "\\|" ? "|" : piece;
  }
  if (!parts[0].trim()) parts.shift();
  if (parts.length && !parts.at(-1).trim()) parts.pop();
  return parts.map((part) => part.trim());
}

function alignment(cell) {
  const [isLeft, isRight] = [cell.startsWith(":"), cell.endsWith(":")];
  return isRight ? (isLeft ? "center" : "right") : "left";
}

function renderTable(head, alignments, rows) {
  const row = (tag, texts) =>
    element(
      "tr",
      {},
      ...alignments.map((side, column) =>
        element(tag, { class: side, scope: tag === "th" ? "col" : null }, inline(texts[column] ?? "")),
      ),
    );
  const body = element("tbody", {}, ...rows.map((texts) => row("td", texts)));
  const content = element("table", {}, element("thead", {}, row("th", head)), body);
  return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, content);
}

// ------------------------------------------------------------------ maths

/** A formula on lines of its own. */
function display(lines, at) {
  const line = lines[at].trim();
  const environment = ENVIRONMENT.exec(line);
  const closing = environment ? `\\end{${environment[1]}}` : DISPLAY.find(([opening]) => line.startsWith(opening))?.[1];
  if (!closing) return null;
  const skipped = environment ? 0 : 2;
  let end = at;
  let text = line.slice(skipped);
  for (let last = text; !last.includes(closing); last = lines[end]) {
    end += 1;
    if (end >= lines.length || end - at > MAX_FORMULA_LINES || !lines[end].trim()) return null;
    text += `\n${lines[end]}`;
  }
  const stop = text.indexOf(closing);
  if (!text.slice(0, stop).trim() || !/^[ .,;]*$/.test(text.slice(stop + closing.length))) return null;
  const source = text.slice(0, environment ? stop + closing.length : stop);
  return {
    end: end + 1,
    render: () =>
      element("div", { class: "formula" }, maths(source, true) ?? element("code", { class: "tex" }, source)),
  };
}
