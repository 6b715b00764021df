// TeX to MathML: the part of TeX's and amsmath's maths that models write. Browsers set MathML themselves; no fonts and
// no styles are needed. A formula with a command that is not known here is not shown wrongly but as its source.

import {
  ACCENTS,
  CLOSING,
  DELIMITERS,
  FONTS,
  FUNCTIONS,
  inAlphabet,
  INTEGRALS,
  LETTERS,
  LIMITS,
  LONG_ARROWS,
  OPENING,
  OPERATORS,
  SIZES,
  SPACES,
  SUMS,
  UNDER_ACCENTS,
  UPRIGHT,
  WIDE_ACCENTS,
} from "./tex_symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TOKEN = /\\(?:[a-zA-Z]+|[^])|%[^\n]*\n?|\s+|\d+(?:\.\d+)?|\.\d+|[^]/gu;
const MAX_DEPTH = 40;
const IGNORED = new Set([
  "\\nonumber",
  "\\notag",
  "\\limits",
  "\\nolimits",
  "\\hline",
  "\\relax",
  "\\displaylimits",
  "\\allowbreak",
  "\\mathstrut",
]);
const TEXTS = {
  text: "",
  textrm: "",
  textnormal: "",
  mbox: "",
  textup: "",
  textbf: "bold",
  textit: "italic",
  emph: "italic",
  texttt: "mono",
  textsf: "sans",
};
const FRACTIONS = { frac: null, dfrac: "true", tfrac: "false", cfrac: "true" };
const STYLES = {
  "\\displaystyle": ["true", "0"],
  "\\textstyle": ["false", "0"],
  "\\scriptstyle": ["false", "1"],
  "\\scriptscriptstyle": ["false", "2"],
};

/** Environments: what encloses them, and how their columns are aligned. */
const ENVIRONMENTS = {
  matrix: {},
  smallmatrix: {},
  array: { hasColumns: true },
  subarray: { hasColumns: true },
  pmatrix: { left: "(", right: ")" },
  bmatrix: { left: "[", right: "]" },
  Bmatrix: { left: "{", right: "}" },
  vmatrix: { left: "|", right: "|" },
  Vmatrix: { left: "‖", right: "‖" },
  cases: { left: "{", align: "l" },
  dcases: { left: "{", align: "l", isDisplay: true },
  rcases: { right: "}", align: "l" },
  aligned: { align: "rl", isDisplay: true },
  align: { align: "rl", isDisplay: true },
  split: { align: "rl", isDisplay: true },
  gathered: { isDisplay: true },
  gather: { isDisplay: true },
  multline: { isDisplay: true },
  equation: { isDisplay: true },
  alignedat: { align: "rl", isDisplay: true, hasColumns: true },
  alignat: { align: "rl", isDisplay: true, hasColumns: true },
};

class TexError extends Error {}

/** A `math` element with the source as its annotation, or null if the source is not understood. */
export function maths(source, isDisplay) {
  try {
    const row = mrow(new Parser(source).all());
    const annotation = node("annotation", { encoding: "application/x-tex" }, source.trim());
    return node("math", { display: isDisplay ? "block" : "inline" }, node("semantics", {}, row, annotation));
  } catch (error) {
    if (error instanceof TexError) return null;
    throw error;
  }
}

function node(tag, attributes, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const mrow = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", {}, ...nodes));
const space = (width) => node("mspace", { width: `${width}em` });
const limitFunction = (name) => node("mo", { movablelimits: "true", form: "prefix", lspace: "0", rspace: "0" }, name);
const fence = (character) => node("mo", { fence: "true", stretchy: "true", symmetric: "true" }, character);

/** A recursive-descent parser over TeX's tokens. */
class Parser {
  #tokens;
  #at = 0;
  #depth = 0;
  #font = null;
  #kinds = new Map(); // of nodes: function, open, operator; others are ordinary
  #limited = new Set(); // nodes whose scripts are set above and below

  constructor(source) {
    this.#tokens = source.match(TOKEN)?.filter((token) => !token.startsWith("%")) ?? [];
  }

  /** All nodes of the source. */
  all() {
    const nodes = this.#row(() => false);
    if (this.#peek() === undefined) return nodes;
    this.#at = 0;
    return [this.#cells((token) => token === undefined, "rl", true)];
  }

  // -------------------------------------------------------------- tokens

  #skipSpaces() {
    while (/^\s/.test(this.#tokens[this.#at] ?? "")) this.#at += 1;
  }

  #peek() {
    this.#skipSpaces();
    return this.#tokens[this.#at];
  }

  #next() {
    const token = this.#peek();
    if (token === undefined) throw new TexError("the formula ends too early");
    this.#at += 1;
    return token;
  }

  #take(token) {
    if (this.#peek() !== token) return false;
    this.#at += 1;
    return true;
  }

  #expect(token) {
    if (!this.#take(token)) throw new TexError(`${token} is missing`);
  }

  /** The tokens of a group as text. */
  #raw() {
    this.#expect("{");
    let text = "";
    for (let depth = 1; ;) {
      const token = this.#tokens[this.#at];
      if (token === undefined) throw new TexError("} is missing");
      this.#at += 1;
      depth += (token === "{") - (token === "}");
      if (depth === 0) return text;
      text += token;
    }
  }

  /** A part in brackets, or null. */
  #optional() {
    if (!this.#take("[")) return null;
    const nodes = this.#row((token) => token === "]");
    this.#expect("]");
    return mrow(nodes);
  }

  /** A group, or one symbol. */
  #argument() {
    const token = this.#peek();
    if (token === "{") return this.#group();
    if (/^\d\d/.test(token ?? "")) {
      this.#tokens[this.#at] = token.slice(1); // x^12 has the exponent 1
      return node("mn", {}, inAlphabet(token[0], this.#font));
    }
    return this.#atom() ?? node("mrow", {});
  }

  #group() {
    this.#expect("{");
    const nodes = this.#row((token) => token === "}");
    this.#expect("}");
    return mrow(nodes);
  }

  // -------------------------------------------------------------- rows and scripts

  /** Nodes up to a token, which stays. */
  #row(isEnd) {
    this.#depth += 1;
    if (this.#depth > MAX_DEPTH) throw new TexError("the formula is nested too deeply");
    const nodes = [];
    let before = null;
    for (let token = this.#peek(); token !== undefined && !isEnd(token) && !ENDS.has(token); token = this.#peek()) {
      if (Object.hasOwn(STYLES, token)) {
        this.#at += 1;
        const [displaystyle, scriptlevel] = STYLES[token];
        nodes.push(node("mstyle", { displaystyle, scriptlevel }, ...this.#row(isEnd)));
        continue;
      }
      const made = this.#scripted();
      if (made === null) continue;
      const kind = this.#kinds.get(made) ?? "ordinary";
      const isApart =
        kind === "function"
          ? before === "ordinary" || before === "function"
          : before === "function" && kind === "ordinary";
      if (isApart) nodes.push(space(0.167));
      nodes.push(made);
      before = kind;
    }
    this.#depth -= 1;
    return nodes;
  }

  #scripted() {
    const isBare = ["^", "_", "'"].includes(this.#peek());
    const base = isBare ? node("mrow", {}) : this.#atom();
    let [below, above, primes] = [null, null, ""];
    for (let token = this.#peek(); ; token = this.#peek()) {
      if (token === "_" && below === null) below = this.#script();
      else if (token === "^" && above === null) above = this.#script();
      else if (token === "'") {
        this.#at += 1;
        primes += "′";
      } else if (token === "_" || token === "^") throw new TexError("a symbol has two scripts of one kind");
      else if (token === "\\limits" || token === "\\nolimits") {
        this.#at += 1;
        if (token === "\\limits") this.#limited.add(base);
        else this.#limited.delete(base);
      } else break;
    }
    if (primes) above = mrow([node("mo", { lspace: "0", rspace: "0" }, primes), ...(above ? [above] : [])]);
    if (base === null || (!below && !above)) return base;
    const made = this.#limited.has(base) ? limits(base, below, above) : scripts(base, below, above);
    return this.#mark(made, this.#kinds.get(base));
  }

  #script() {
    this.#at += 1;
    return this.#argument();
  }

  // -------------------------------------------------------------- atoms

  /** One symbol, group or command; null for a command that sets nothing. */
  #atom() {
    const token = this.#peek();
    if (token === "{") return this.#group();
    this.#next();
    if (IGNORED.has(token)) return null;
    if (token.startsWith("\\")) return this.#command(token.slice(1), token);
    if (/^[\d.]*\d$/.test(token))
      return node("mn", {}, [...token].map((digit) => inAlphabet(digit, this.#font)).join(""));
    if (/^\p{L}$/u.test(token)) return this.#letter(token);
    if (token === "~") return space(SPACES["~"]);
    return this.#character(token);
  }

  #letter(character) {
    if (this.#font === null) return node("mi", {}, character);
    const changed = inAlphabet(character, this.#font);
    return node("mi", { mathvariant: this.#font === "normal" || changed !== character ? "normal" : null }, changed);
  }

  #character(character) {
    if (OPENING.has(character)) return this.#mark(node("mo", { stretchy: "false", form: "prefix" }, character), "open");
    if (CLOSING.has(character)) return node("mo", { stretchy: "false", form: "postfix" }, character);
    if (character === "|" || character === "‖")
      return node("mo", { stretchy: "false", lspace: "0", rspace: "0" }, character);
    if (character === "/") return this.#mark(node("mo", { lspace: "0", rspace: "0" }, "/"), "operator");
    if (["#", "&", "$", "^", "_", "}"].includes(character)) throw new TexError(`${character} is not expected`);
    return this.#mark(node("mo", {}, { "-": "−", "*": "∗" }[character] ?? character), "operator");
  }

  #mark(made, kind, isLimited = false) {
    if (kind) this.#kinds.set(made, kind);
    if (isLimited) this.#limited.add(made);
    return made;
  }

  #command(name, token) {
    if (Object.hasOwn(LETTERS, name)) return this.#letter(LETTERS[name]);
    if (Object.hasOwn(UPRIGHT, name))
      return node("mi", { mathvariant: "normal" }, inAlphabet(UPRIGHT[name], this.#font));
    if (Object.hasOwn(OPERATORS, name)) return this.#mark(node("mo", {}, OPERATORS[name]), "operator");
    if (Object.hasOwn(SUMS, name))
      return this.#mark(node("mo", { movablelimits: "true" }, SUMS[name]), "operator", true);
    if (Object.hasOwn(INTEGRALS, name)) return this.#mark(node("mo", {}, INTEGRALS[name]), "operator");
    if (FUNCTIONS.has(name)) return this.#mark(node("mi", {}, name), "function");
    if (Object.hasOwn(LIMITS, name)) return this.#mark(limitFunction(LIMITS[name]), "function", true);
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (Object.hasOwn(DELIMITERS, token)) return this.#character(DELIMITERS[token]);
    if (/^\s/.test(name)) return space(SPACES[" "]);
    return this.#structure(name);
  }

  /** Commands with arguments. */
  #structure(name) {
    if (Object.hasOwn(FRACTIONS, name)) return this.#fraction(FRACTIONS[name]);
    if (Object.hasOwn(FONTS, name)) return this.#inFont(FONTS[name]);
    if (Object.hasOwn(TEXTS, name)) return textNode(this.#raw(), TEXTS[name]);
    if (Object.hasOwn(ACCENTS, name))
      return node("mover", { accent: "true" }, this.#argument(), node("mo", { stretchy: "false" }, ACCENTS[name]));
    if (Object.hasOwn(WIDE_ACCENTS, name))
      return this.#mark(
        node("mover", {}, this.#argument(), node("mo", { stretchy: "true" }, WIDE_ACCENTS[name])),
        null,
        true,
      );
    if (Object.hasOwn(UNDER_ACCENTS, name))
      return this.#mark(
        node("munder", {}, this.#argument(), node("mo", { stretchy: "true" }, UNDER_ACCENTS[name])),
        null,
        true,
      );
    if (Object.hasOwn(LONG_ARROWS, name)) return this.#longArrow(LONG_ARROWS[name]);
    const size = /^(bigg?|Bigg?)[lrm]?$/.exec(name);
    if (size) return this.#sized(SIZES[size[1]]);
    if (!Object.hasOwn(STRUCTURES, name)) throw new TexError(`\\${name} is not known`);
    return STRUCTURES[name]({
      argument: () => this.#argument(),
      optional: () => this.#optional(),
      raw: () => this.#raw(),
      delimited: () => this.#delimited(),
      environment: () => this.#environment(),
      lines: () => this.#lines(),
      hasStar: () => this.#take("*"),
      mark: (made, kind, isLimited) => this.#mark(made, kind, isLimited),
      atom: () => this.#atom(),
    });
  }

  #fraction(displaystyle) {
    const made = node("mfrac", {}, this.#argument(), this.#argument());
    return displaystyle === null ? made : node("mstyle", { displaystyle, scriptlevel: "0" }, made);
  }

  #inFont(font) {
    const before = this.#font;
    this.#font = font;
    const made = this.#argument();
    this.#font = before;
    return made;
  }

  #longArrow(arrow) {
    const below = this.#optional();
    const above = this.#argument();
    return this.#mark(limits(node("mo", { stretchy: "true" }, arrow), below, above), "operator");
  }

  #sized(size) {
    const character = this.#delimiter();
    const bounds = {
      stretchy: "true",
      symmetric: "true",
      minsize: `${size}em`,
      maxsize: `${size}em`,
      lspace: "0",
      rspace: "0",
    };
    return this.#mark(node("mo", bounds, character), OPENING.has(character) ? "open" : "ordinary");
  }

  #delimiter() {
    const token = this.#next();
    if (!Object.hasOwn(DELIMITERS, token)) throw new TexError(`${token} is not a delimiter`);
    return DELIMITERS[token];
  }

  /** `\left( ... \middle| ... \right)` after its `\left`. */
  #delimited() {
    const nodes = [fence(this.#delimiter())];
    while (true) {
      nodes.push(...this.#row((token) => token === "\\middle" || token === "\\right"));
      const isEnd = this.#next() === "\\right";
      nodes.push(fence(this.#delimiter()));
      if (isEnd) return node("mrow", {}, ...nodes);
    }
  }

  // -------------------------------------------------------------- tables

  #environment() {
    const name = this.#raw();
    const plain = name.replace("*", "");
    if (!Object.hasOwn(ENVIRONMENTS, plain)) throw new TexError(`the environment ${name} is not known`);
    const { left, right, align = "c", isDisplay, hasColumns } = ENVIRONMENTS[plain];
    const columns = (hasColumns && this.#raw().replace(/[^lcr]/g, "")) || align;
    const made = this.#cells((token) => token === "\\end", columns, isDisplay);
    this.#expect("\\end");
    if (this.#raw() !== name) throw new TexError(`the environment ${name} is not ended`);
    if (left === undefined && right === undefined) return made;
    return node("mrow", {}, fence(left ?? ""), made, fence(right ?? ""));
  }

  /** Lines of a `\substack`. */
  #lines() {
    this.#expect("{");
    const made = this.#cells((token) => token === "}", "c", false);
    this.#expect("}");
    return made;
  }

  #cells(isEnd, columns, isDisplay) {
    const rows = [[]];
    while (true) {
      const cell = this.#row((token) => token === "&" || token === "\\\\" || token === "\\cr" || isEnd(token));
      const side = columns[rows.at(-1).length % columns.length];
      rows.at(-1).push(node("mtd", { class: `column-${side}` }, ...cell));
      const token = this.#peek();
      if (isEnd(token)) break;
      if (!["&", "\\\\", "\\cr"].includes(token)) throw new TexError("a table is not ended");
      this.#at += 1;
      if (token !== "&") {
        if (this.#tokens[this.#at] === "[") this.#optional();
        rows.push([]);
      }
    }
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].hasChildNodes()) rows.pop();
    const attributes = isDisplay ? { displaystyle: "true", class: "lines" } : {};
    return node("mtable", attributes, ...rows.map((row) => node("mtr", {}, ...row)));
  }
}

/** Tokens that end any row: they belong to what encloses it. */
const ENDS = new Set(["}", "&", "\\\\", "\\cr", "\\right", "\\middle", "\\end"]);

/** Commands with arguments of their own kinds. */
const STRUCTURES = {
  left: ({ delimited }) => delimited(),
  begin: ({ environment }) => environment(),
  substack: ({ lines }) => lines(),
  sqrt({ optional, argument }) {
    const degree = optional();
    return degree ? node("mroot", {}, argument(), degree) : node("msqrt", {}, argument());
  },
  binom: ({ argument }) => binomial(argument(), argument()),
  dbinom: ({ argument }) => binomial(argument(), argument()),
  tbinom: ({ argument }) => binomial(argument(), argument()),
  overline: ({ argument }) => node("mrow", { class: "overline" }, argument()),
  underline: ({ argument }) => node("mrow", { class: "underline" }, argument()),
  boxed: ({ argument }) => node("mrow", { class: "boxed" }, argument()),
  phantom: ({ argument }) => node("mphantom", {}, argument()),
  overset: ({ argument, mark }) => over(argument, mark),
  stackrel: ({ argument, mark }) => over(argument, mark),
  underset({ argument, mark }) {
    const below = argument();
    return mark(node("munder", {}, argument(), below), "operator");
  },
  operatorname({ hasStar, raw, mark }) {
    const isLimited = hasStar();
    const name = raw()
      .replace(/\\[,;: ]/g, "\u2009")
      .replaceAll("\\!", "");
    const made = isLimited
      ? limitFunction(name)
      : node("mi", { mathvariant: name.length === 1 ? "normal" : null }, name);
    return mark(made, "function", isLimited);
  },
  mathop: ({ argument, mark }) => mark(node("mrow", {}, argument()), "operator", true),
  mathbin: ({ argument }) => argument(),
  mathrel: ({ argument }) => argument(),
  mathord: ({ argument }) => argument(),
  mathopen: ({ argument }) => argument(),
  mathclose: ({ argument }) => argument(),
  mathpunct: ({ argument }) => argument(),
  mathinner: ({ argument }) => argument(),
  bmod: ({ mark }) => mark(node("mo", { lspace: "0.222em", rspace: "0.222em" }, "mod"), "operator"),
  mod: ({ argument }) => node("mrow", {}, space(1), node("mi", {}, "mod"), space(0.333), argument()),
  pmod: ({ argument }) =>
    node(
      "mrow",
      {},
      space(1),
      node("mo", { form: "prefix", stretchy: "false" }, "("),
      node("mi", {}, "mod"),
      space(0.333),
      argument(),
      node("mo", { form: "postfix", stretchy: "false" }, ")"),
    ),
  not({ atom }) {
    const made = atom();
    if (made?.localName !== "mo") throw new TexError("\\not is followed by no relation");
    made.textContent += "\u0338";
    return made;
  },
  tag: ({ hasStar, raw }) => node("mrow", {}, space(2), node("mtext", {}, hasStar() ? raw() : `(${raw()})`)),
  label({ raw }) {
    raw();
    return null;
  },
  color({ raw }) {
    raw();
    return null;
  },
  textcolor({ raw, argument }) {
    raw();
    return argument();
  },
  hspace({ hasStar, raw }) {
    hasStar();
    const width = /^\s*(-?\d*\.?\d+)\s*em\s*$/.exec(raw());
    return space(width ? Number(width[1]) : 1);
  },
};

function over(argument, mark) {
  const above = argument();
  return mark(node("mover", {}, argument(), above), "operator");
}

function binomial(top, bottom) {
  return node("mrow", {}, fence("("), node("mfrac", { linethickness: "0" }, top, bottom), fence(")"));
}

function scripts(base, below, above) {
  if (below && above) return node("msubsup", {}, base, below, above);
  return below ? node("msub", {}, base, below) : node("msup", {}, base, above);
}

function limits(base, below, above) {
  if (below && above) return node("munderover", {}, base, below, above);
  return below ? node("munder", {}, base, below) : node("mover", {}, base, above);
}

function textNode(source, font) {
  const text = source
    .replace(/\\([%$#&_{} ])/g, "$1")
    .replaceAll("~", " ")
    .replace(/[{}]/g, "");
  if (text.includes("\\") || text.includes("$")) throw new TexError("text has commands");
  const characters = font ? [...text].map((character) => inAlphabet(character, font)).join("") : text;
  return node("mtext", {}, characters.replace(/^\s+|\s+$/g, "\u00a0"));
}
