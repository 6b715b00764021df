// Inline Markdown to DOM nodes: emphasis, code, links, maths. There is no HTML: what is not Markdown stays text. Images
// are links: nothing that a model writes is loaded.

import { element } from "./dom.js";
import { maths } from "./tex.js";

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const BARE_URL = /https?:\/\/[^\s<>"`*|\\^{}[\]]{1,2000}/y;
const ANGLE_URL = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const HTTP = /https?:\/\//iy;
const LINE_BREAK = /<br ?\/?>/iy;
const RUN = { "*": /\*+/y, _: /_+/y, "~": /~+/y, "`": /`+/y };
const MAX_RUN = 8;
const MAX_DEPTH = 20;
const MAX_LENGTH = 4000;

/** The nodes of a text without blank lines. */
export function inline(text) {
  return new Inline(text).parse();
}

/** A link to another site, or null for an address that is not HTTP or that hides its host after a user name. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) && !url.username && !url.password ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(href, ...children) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}

function formula(source, isDisplay) {
  return maths(source, isDisplay) ?? element("code", { class: "tex" }, source);
}

/** One pass over the text. Delimiters of emphasis and brackets wait on stacks until they are matched. */
class Inline {
  #text;
  #at = 0;
  #plain = "";
  #nodes = document.createDocumentFragment();
  #delimiters = [];
  #brackets = [];
  #depths = new Map();

  constructor(text) {
    this.#text = text;
  }

  parse() {
    while (this.#at < this.#text.length) {
      if (this.#special(this.#text[this.#at])) continue;
      this.#plain += this.#text[this.#at];
      this.#at += 1;
    }
    this.#flush();
    this.#pairDelimiters(0);
    return this.#nodes;
  }

  /** Whether something other than plain text begins here; if so, it is consumed. */
  #special(character) {
    switch (character) {
      case "\\":
        return this.#escape();
      case "`":
        return this.#code();
      case "$":
        return this.#dollars();
      case "*":
      case "_":
      case "~":
        return this.#delimiter(character);
      case "!":
        return this.#text[this.#at + 1] === "[" && this.#openBracket("![");
      case "[":
        return this.#openBracket("[");
      case "]":
        return this.#closeBracket();
      case "<":
        return this.#angle();
      case "h":
        return this.#bareUrl();
      case "\n":
        return this.#lineBreak(this.#at + 1);
      default:
        return false;
    }
  }

  #flush() {
    if (this.#plain) this.#nodes.append(this.#plain);
    this.#plain = "";
  }

  #add(node, end) {
    this.#flush();
    this.#nodes.append(node);
    this.#at = end;
    return true;
  }

  #match(pattern, at = this.#at) {
    pattern.lastIndex = at;
    return pattern.exec(this.#text);
  }

  #lineBreak(end) {
    this.#plain = this.#plain.trimEnd();
    while (this.#text[end] === " ") end += 1;
    return this.#add(element("br"), end);
  }

  // -------------------------------------------------------------- escapes, code, maths

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    if (next === "\n") return this.#lineBreak(this.#at + 2);
    if (next === "(" || next === "[") {
      const end = this.#find(next === "(" ? "\\)" : "\\]", this.#at + 2);
      if (end !== null) return this.#add(formula(this.#text.slice(this.#at + 2, end), next === "["), end + 2);
    }
    if (!PUNCTUATION.test(next)) return false;
    this.#plain += next;
    this.#at += 2;
    return true;
  }

  #find(closing, from) {
    const end = this.#text.slice(from, from + MAX_LENGTH).indexOf(closing);
    return end > 0 ? from + end : null;
  }

  #code() {
    const [ticks] = this.#match(RUN["`"]);
    const from = this.#at + ticks.length;
    for (const run of this.#text.slice(from).matchAll(/`+/g)) {
      if (run[0].length !== ticks.length) continue;
      let code = this.#text.slice(from, from + run.index).replaceAll("\n", " ");
      if (/^ .* $/.test(code) && code.trim()) code = code.slice(1, -1);
      return this.#add(element("code", {}, code), from + run.index + ticks.length);
    }
    this.#plain += ticks;
    this.#at = from;
    return true;
  }

  /** `$$x$$`, or `$x$` without spaces inside its dollars and without a digit after it: $5 and $10 are money. */
  #dollars() {
    const from = this.#at + 1;
    if (this.#text[from] === "$") {
      const end = this.#find("$$", from + 1);
      return end !== null && this.#add(formula(this.#text.slice(from + 1, end), true), end + 2);
    }
    if (/\s/.test(this.#text[from] ?? " ")) return false;
    const limit = Math.min(this.#text.length, from + MAX_LENGTH);
    for (let end = from; end < limit; end += 1) {
      if (this.#text[end] === "\\") end += 1;
      else if (this.#text[end] === "$") {
        if (/\s/.test(this.#text[end - 1]) || /\d/.test(this.#text[end + 1] ?? "")) continue;
        return end > from && this.#add(formula(this.#text.slice(from, end), false), end + 1);
      }
    }
    return false;
  }

  // -------------------------------------------------------------- links

  #angle() {
    const address = this.#match(ANGLE_URL);
    const href = address && safeUrl(address[1]);
    if (href) return this.#add(anchor(href, address[1]), this.#at + address[0].length);
    const tag = this.#match(LINE_BREAK);
    return tag !== null && this.#lineBreak(this.#at + tag[0].length);
  }

  #bareUrl() {
    if (WORD.test(this.#text[this.#at - 1] ?? "")) return false;
    const found = this.#match(BARE_URL);
    if (!found) return false;
    let address = found[0];
    const isSurplus = () =>
      /[.,:;!?'_~$]$/.test(address) || (address.endsWith(")") && address.split("(").length < address.split(")").length);
    while (isSurplus()) address = address.slice(0, -1);
    const href = safeUrl(address);
    return href !== null && this.#add(anchor(href, address), this.#at + address.length);
  }

  #openBracket(mark) {
    const node = document.createTextNode(mark);
    this.#add(node, this.#at + mark.length);
    this.#brackets.push({ node, isImage: mark === "![", bottom: this.#delimiters.length });
    return true;
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const target = bracket && this.#target(this.#at + 1);
    const href = target && safeUrl(target.address);
    if (!href) return false;
    this.#flush();
    this.#pairDelimiters(bracket.bottom);
    const content = document.createDocumentFragment();
    while (bracket.node.nextSibling) content.append(bracket.node.nextSibling);
    for (const inner of content.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    if (bracket.isImage) content.prepend("Image: ");
    if (!content.textContent) content.append(href);
    bracket.node.remove();
    if (!bracket.isImage) this.#brackets = [];
    return this.#add(anchor(href, content), target.end);
  }

  /** The address in `(address "title")` and where that ends, or null if that is not HTTP. */
  #target(from) {
    if (this.#text[from] !== "(") return null;
    const start = this.#skipSpaces(from + 1);
    const isQuoted = this.#text[start] === "<";
    if (!this.#match(HTTP, isQuoted ? start + 1 : start)) return null;
    const stop = isQuoted ? this.#find(">", start + 1) : this.#endOfAddress(start);
    if (stop === null) return null;
    const address = this.#text.slice(isQuoted ? start + 1 : start, stop);
    let end = this.#skipSpaces(isQuoted ? stop + 1 : stop);
    if (this.#text[end] === '"' || this.#text[end] === "'") {
      const closing = this.#find(this.#text[end], end + 1);
      if (closing === null) return null;
      end = this.#skipSpaces(closing + 1);
    }
    return this.#text[end] === ")" ? { address, end: end + 1 } : null;
  }

  #skipSpaces(at) {
    while (this.#text[at] === " " || this.#text[at] === "\n") at += 1;
    return at;
  }

  /** Where an address ends: at a space, or at a parenthesis that was not opened in it. */
  #endOfAddress(start) {
    let depth = 0;
    for (let at = start; at < Math.min(this.#text.length, start + MAX_LENGTH); at += 1) {
      const character = this.#text[at];
      if (/\s/.test(character) || (character === ")" && depth === 0)) return at;
      depth += (character === "(") - (character === ")");
    }
    return null;
  }

  // -------------------------------------------------------------- emphasis

  #delimiter(character) {
    const [run] = this.#match(RUN[character]);
    const [before, after] = [this.#text[this.#at - 1] ?? " ", this.#text[this.#at + run.length] ?? " "];
    let [canOpen, canClose] = [/\S/.test(after), /\S/.test(before)];
    if (character === "_") [canOpen, canClose] = [canOpen && !WORD.test(before), canClose && !WORD.test(after)];
    const isDelimiter = (canOpen || canClose) && run.length <= MAX_RUN && (character !== "~" || run.length === 2);
    if (!isDelimiter) {
      this.#plain += run;
      this.#at += run.length;
      return true;
    }
    const node = document.createTextNode(run);
    this.#delimiters.push({ node, character, canOpen, canClose, length: run.length });
    return this.#add(node, this.#at + run.length);
  }

  /** Turn pairs of delimiters above `bottom` of the stack into elements, inner pairs first; the others stay text. */
  #pairDelimiters(bottom) {
    const stack = this.#delimiters;
    const floors = new Map(); // below these, no opener was found for a closer of this kind
    let at = bottom;
    while (at < stack.length) {
      const closer = stack[at];
      const kind = `${closer.character}${closer.canOpen}${closer.length % 3}`;
      const floor = Math.max(bottom, floors.get(kind) ?? bottom);
      let from = closer.canClose ? at - 1 : -1;
      while (from >= floor && !isPair(stack[from], closer)) from -= 1;
      if (from < floor) {
        floors.set(kind, at);
        at += 1;
        continue;
      }
      const opener = stack[from];
      if (!this.#wrap(opener, closer)) {
        stack.splice(bottom, at + 1 - bottom); // what encloses this pair would be nested as deeply
        at = bottom;
        floors.clear();
        continue;
      }
      stack.splice(from + 1, at - from - 1);
      at = from + 1;
      if (!opener.node.data) {
        stack.splice(from, 1);
        at -= 1;
      }
      if (!closer.node.data) stack.splice(at, 1);
      for (const [name, value] of floors) floors.set(name, Math.min(value, at));
    }
    for (const { node } of stack.splice(bottom)) if (!node.data) node.remove();
  }

  /** Move what is between two delimiters into an element and shorten both; false if that would be nested too deeply. */
  #wrap(opener, closer) {
    const count = Math.min(2, opener.node.data.length, closer.node.data.length);
    const tag = opener.character === "~" ? "del" : count === 2 ? "strong" : "em";
    let depth = 1;
    for (let node = opener.node.nextSibling; node !== closer.node; node = node.nextSibling) {
      depth = Math.max(depth, 1 + (this.#depths.get(node) ?? 0));
    }
    if (depth > MAX_DEPTH) return false;
    const wrapper = element(tag);
    while (opener.node.nextSibling !== closer.node) wrapper.append(opener.node.nextSibling);
    this.#depths.set(wrapper, depth);
    closer.node.before(wrapper);
    for (const { node } of [opener, closer]) node.data = node.data.slice(count);
    return true;
  }
}

/** Whether two runs of delimiters enclose emphasis, as CommonMark has it. */
function isPair(opener, closer) {
  if (!opener.canOpen || opener.character !== closer.character) return false;
  if (closer.character === "~") return true;
  const isAmbiguous = opener.canClose || closer.canOpen;
  const isOdd = (opener.length + closer.length) % 3 === 0 && !(opener.length % 3 === 0 && closer.length % 3 === 0);
  return !(isAmbiguous && isOdd);
}
